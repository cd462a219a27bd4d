// A CUDA device: weights, gradient and one shared workspace in its memory, kernels/cuda for the arithmetic.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_DEVICE_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_DEVICE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine {

// kPortable: the path that runs on every GPU is used even on Hopper; for tests and measurements.
enum class CudaPath { kFastest, kPortable };

struct CudaOptions {
  // The ceiling of the device memory for E of all heads together; 0: 1.25 GiB, or a quarter of the device if
  // that is less.
  int64_t workspace_bytes = 0;
  // Page-locked host memory for payloads and results (Device::RegisteredBytes), beside that of the batches.
  int64_t pinned_bytes = 0;
  ChunkLimits chunk_limits;
  CudaPath path = CudaPath::kFastest;
};

// Takes the workspace and the memory for batches of chunks within the limits at once. Nothing is allocated
// afterwards but by CreateHead. FAILED_PRECONDITION if there is no such device. The device must outlive its
// heads.
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int index, const CudaOptions& options);

// Those that this process may use; 0 where there is no driver.
int CudaDeviceCount();

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_DEVICE_H_
