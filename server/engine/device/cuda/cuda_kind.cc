#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "server/engine/device/cuda/cuda_device.h"
#include "server/engine/device/device_kind.h"

namespace lossd::engine::cuda {
namespace {

// The number of "cuda:N"; negative if it is none.
int IndexOf(absl::string_view name) {
  int index = -1;
  if (!absl::ConsumePrefix(&name, "cuda:") || name.size() > 3 || !absl::SimpleAtoi(name, &index)) return -1;
  return index;
}

bool Knows(absl::string_view name) { return IndexOf(name) >= 0; }

absl::StatusOr<std::unique_ptr<Device>> Create(const DeviceOptions& options) {
  return CreateCudaDevice(IndexOf(options.name), {.workspace_bytes = options.workspace_bytes,
                                                  .pinned_bytes = options.pinned_bytes,
                                                  .chunk_limits = options.chunk_limits});
}

}  // namespace

DeviceKind Kind() { return {&Knows, "cuda:0", &Create, &CudaDeviceCount}; }

}  // namespace lossd::engine::cuda
