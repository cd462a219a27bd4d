#include "server/engine/device/cuda/cuda_region.h"

#include <array>
#include <string>
#include <utility>

#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"
#include "server/engine/device/cuda/cuda_status.h"

namespace lossd::engine {
namespace {

using kernels::cuda::DeviceBuffer;
using kernels::cuda::Result;

class DeviceRegion : public RegionMemory {
 public:
  Result Create(int index, int64_t bytes) {
    LOSSD_CUDA_TRY(cudaSetDevice(index));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, &buffer_));
    // What somebody else left there is nobody's business.
    LOSSD_CUDA_TRY(cudaMemset(buffer_.data(), 0, static_cast<size_t>(bytes)));
    LOSSD_CUDA_TRY(cudaStreamSynchronize(nullptr));
    LOSSD_CUDA_TRY(cudaIpcGetMemHandle(&handle_, buffer_.data()));
    LOSSD_CUDA_TRY(cudaDeviceGetPCIBusId(bus_id_.data(), static_cast<int>(bus_id_.size()), index));
    return {};
  }

  std::byte* data() const override { return static_cast<std::byte*>(buffer_.data()); }
  int64_t size() const override { return buffer_.bytes(); }
  MemoryPlace place() const override { return MemoryPlace::kDevice; }
  std::string device_handle() const override {
    return {static_cast<const char*>(handle_.reserved), sizeof(handle_.reserved)};
  }
  std::string device_bus_id() const override { return bus_id_.data(); }

 private:
  DeviceBuffer buffer_;
  cudaIpcMemHandle_t handle_{};
  std::array<char, 32> bus_id_{};
};

class RegisteredRegion : public RegionMemory {
 public:
  RegisteredRegion(int index, std::shared_ptr<RegionMemory> memory)
      : index_(index), memory_(std::move(memory)) {}
  ~RegisteredRegion() override {
    if (!registered_) return;
    (void)cudaSetDevice(index_);
    (void)cudaHostUnregister(memory_->data());
  }

  bool Register() {
    registered_ = cudaSetDevice(index_) == cudaSuccess &&
                  cudaHostRegister(memory_->data(), static_cast<size_t>(memory_->size()),
                                   cudaHostRegisterDefault) == cudaSuccess;
    return registered_;
  }

  std::byte* data() const override { return memory_->data(); }
  int64_t size() const override { return memory_->size(); }
  MemoryPlace place() const override { return MemoryPlace::kRegisteredHost; }
  int file() const override { return memory_->file(); }
  void GiveUp() override { memory_->GiveUp(); }

 private:
  const int index_;
  const std::shared_ptr<RegionMemory> memory_;
  bool registered_ = false;
};

}  // namespace

absl::StatusOr<std::shared_ptr<RegionMemory>> CreateCudaDeviceRegion(int index, int64_t bytes) {
  auto region = std::make_shared<DeviceRegion>();
  const Result result = region->Create(index, bytes);
  if (result.ok()) return region;
  (void)cudaGetLastError();  // not to be found by the next call that looks for its own
  return ToStatus(result.code() == cudaErrorMemoryAllocation ? absl::StatusCode::kResourceExhausted
                                                             : absl::StatusCode::kFailedPrecondition,
                  result);
}

absl::StatusOr<std::shared_ptr<RegionMemory>> CreateCudaHostRegion(int index, int64_t bytes) {
  absl::StatusOr<std::shared_ptr<RegionMemory>> memory = CreateSystemMemory(bytes);
  if (!memory.ok()) return memory.status();
  auto registered = std::make_shared<RegisteredRegion>(index, *memory);
  if (registered->Register()) return registered;
  (void)cudaGetLastError();
  return memory;
}

}  // namespace lossd::engine
