#include "server/engine/device/device_factory.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/linear_cross_entropy.h"
#include "server/engine/device/cpu/cpu_backend.h"
#ifdef LOSSD_CUDA
#include "server/engine/device/cuda/cuda_device.h"
#endif
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

// The number of "cuda:N"; negative if it is none.
int CudaIndex(absl::string_view name) {
  int index = -1;
  if (!absl::ConsumePrefix(&name, "cuda:") || name.size() > 3 || !absl::SimpleAtoi(name, &index)) return -1;
  return index;
}

absl::StatusOr<std::unique_ptr<Device>> CreateCuda(int index, const DeviceOptions& options) {
#ifdef LOSSD_CUDA
  return CreateCudaDevice(index, {.workspace_bytes = options.workspace_bytes,
                                  .pinned_bytes = options.pinned_bytes,
                                  .chunk_limits = options.chunk_limits});
#else
  (void)options;
  return MakeError(
      absl::StatusCode::kFailedPrecondition, RejectReason::kInternal, "device",
      absl::StrCat("cuda:", index, ": this lossd was built without CUDA (no CUDA toolkit was found)"));
#endif
}

}  // namespace

bool IsDeviceName(absl::string_view name) { return name == "auto" || name == "cpu" || CudaIndex(name) >= 0; }

absl::StatusOr<ChosenDevice> CreateDevice(const DeviceOptions& options) {
  ChosenDevice chosen;
  if (options.name != "cpu") {
    const bool automatic = options.name == "auto";
    absl::StatusOr<std::unique_ptr<Device>> cuda =
        CreateCuda(automatic ? 0 : CudaIndex(options.name), options);
    if (cuda.ok()) {
      chosen.device = *std::move(cuda);
      return chosen;
    }
    if (!automatic) return cuda.status();
    chosen.why_cpu = std::string(cuda.status().message());
  }
  absl::StatusOr<std::unique_ptr<Device>> cpu = CreateCpuDevice(
      options.workspace_bytes == 0 ? kernels::kDefaultCpuWorkspaceBytes : options.workspace_bytes,
      options.staging_bytes);
  if (!cpu.ok()) return cpu.status();
  chosen.device = *std::move(cpu);
  return chosen;
}

}  // namespace lossd::engine
