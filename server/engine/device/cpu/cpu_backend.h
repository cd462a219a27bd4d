// The CPU as a device: weights, gradient and one shared workspace in host memory, kernels/cpu for the
// arithmetic.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CPU_CPU_BACKEND_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CPU_CPU_BACKEND_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine {

// `workspace_bytes` is the ceiling of the memory for logits of all heads together; it is reserved at once and
// taken page by page as it is first used. The device must outlive its heads.
absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(int64_t workspace_bytes);

// The same, where sessions may have `staging_bytes` of the same memory under way: AvailableMemory() leaves
// them out.
absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(int64_t workspace_bytes, int64_t staging_bytes);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CPU_CPU_BACKEND_H_
