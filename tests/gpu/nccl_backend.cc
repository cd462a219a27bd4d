// NCCL for the cases of tests/unit/collectives: one GPU a rank.
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "kernels/collectives/nccl_communicator.h"
#include "tests/unit/collectives/backend.h"

namespace lossd::kernels::collectives::testing {
namespace {

void ExpectCuda(cudaError_t status) { EXPECT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

// In a process of its own: CUDA does not work in the child of a process that has used it.
int CountDevices() {
  const pid_t process = fork();
  if (process == 0) {
    int devices = 0;
    _exit(cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0);
  }
  int status = 0;
  return process > 0 && waitpid(process, &status, 0) == process && WIFEXITED(status) ? WEXITSTATUS(status)
                                                                                     : 0;
}

class DeviceMemory final : public Memory {
 public:
  explicit DeviceMemory(int64_t bytes) {
    ExpectCuda(cudaMalloc(&memory_, static_cast<size_t>(std::max(bytes, int64_t{1}))));
    ExpectCuda(cudaMemset(memory_, 0xff, static_cast<size_t>(bytes)));
    ExpectCuda(cudaDeviceSynchronize());
  }
  // It is not freed: after a fault the device may still be at work, and the process ends soon.
  void* data() override { return memory_; }
  void Set(const void* from, int64_t bytes) override {
    ExpectCuda(cudaMemcpy(memory_, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
    ExpectCuda(cudaDeviceSynchronize());
  }
  void Get(void* to, int64_t bytes) override {
    ExpectCuda(cudaMemcpy(to, memory_, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost));
  }

 private:
  void* memory_ = nullptr;
};

class NcclBackend final : public Backend {
 public:
  std::string Missing(int ranks) override {
    static const int devices = CountDevices();
    if (devices >= ranks) return {};
    return std::to_string(ranks) + " ranks need as many GPUs, and here are " + std::to_string(devices);
  }
  // Within a host NCCL has no connection whose end would tell it.
  bool NoticesLostPeers() override { return false; }
  std::chrono::milliseconds ShortTimeout() override { return std::chrono::seconds(20); }
  Result Connect(Rank& rank, std::chrono::milliseconds timeout,
                 std::unique_ptr<Communicator>* communicator) override {
    return ConnectNccl({.rank = rank.rank, .size = rank.size, .device = rank.rank, .timeout = timeout},
                       rank.rendezvous, communicator);
  }
  std::unique_ptr<Memory> Allocate(int64_t bytes) override { return std::make_unique<DeviceMemory>(bytes); }
  void* Stream() override {
    if (stream_ == nullptr) ExpectCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    return stream_;
  }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace

Backend& BackendUnderTest() {
  static NcclBackend backend;
  return backend;
}

}  // namespace lossd::kernels::collectives::testing
