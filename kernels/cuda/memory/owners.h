// Owners of CUDA's resources. All are movable, not copyable, empty by default, and release on destruction.
// Threads: each object belongs to one thread at a time.
#ifndef LOSSD_KERNELS_CUDA_MEMORY_OWNERS_H_
#define LOSSD_KERNELS_CUDA_MEMORY_OWNERS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <type_traits>

#include "kernels/cuda/memory/result.h"

namespace lossd::kernels::cuda {

namespace internal {
struct FreeDevice {
  void operator()(void* pointer) const { (void)cudaFree(pointer); }
};
struct FreePinned {
  void operator()(void* pointer) const { (void)cudaFreeHost(pointer); }
};
struct DestroyStream {
  void operator()(cudaStream_t stream) const { (void)cudaStreamDestroy(stream); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { (void)cudaEventDestroy(event); }
};
}  // namespace internal

// Memory that `kAllocate` gives and `Free` takes back.
template <cudaError_t (*kAllocate)(void**, size_t), class Free>
class Buffer {
 public:
  static Result Create(int64_t bytes, Buffer* buffer) {
    void* pointer = nullptr;
    LOSSD_CUDA_TRY(kAllocate(&pointer, static_cast<size_t>(bytes > 0 ? bytes : 1)));
    buffer->memory_.reset(pointer);
    buffer->bytes_ = bytes;
    return {};
  }
  void* data() const { return memory_.get(); }
  int64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<void, Free> memory_;
  int64_t bytes_ = 0;
};

// Memory of the current device, aligned to 256 bytes.
using DeviceBuffer = Buffer<cudaMalloc, internal::FreeDevice>;
// Page-locked memory of the host: copies from and to it run beside everything else.
using PinnedBuffer = Buffer<cudaMallocHost, internal::FreePinned>;

class Stream {
 public:
  static Result Create(Stream* stream) {
    cudaStream_t handle = nullptr;
    LOSSD_CUDA_TRY(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
    stream->handle_.reset(handle);
    return {};
  }
  // One whose kernels get the first multiprocessors that become free.
  static Result CreateUrgent(Stream* stream) {
    int least = 0;
    int greatest = 0;
    LOSSD_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t handle = nullptr;
    LOSSD_CUDA_TRY(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, greatest));
    stream->handle_.reset(handle);
    return {};
  }
  cudaStream_t get() const { return handle_.get(); }

 private:
  std::unique_ptr<std::remove_pointer_t<cudaStream_t>, internal::DestroyStream> handle_;
};

// Events order streams; those made with timing also measure.
class Event {
 public:
  enum class Timing { kNo, kYes };
  static Result Create(Event* event, Timing timing = Timing::kNo) {
    cudaEvent_t handle = nullptr;
    LOSSD_CUDA_TRY(cudaEventCreateWithFlags(
        &handle, timing == Timing::kYes ? cudaEventDefault : cudaEventDisableTiming));
    event->handle_.reset(handle);
    return {};
  }
  cudaEvent_t get() const { return handle_.get(); }

 private:
  std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, internal::DestroyEvent> handle_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_MEMORY_OWNERS_H_
