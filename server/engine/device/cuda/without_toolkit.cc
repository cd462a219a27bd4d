// In place of all other sources of CUDA devices where no CUDA toolkit was found.
#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/cuda/cuda_device.h"

namespace lossd::engine {

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int index, const CudaOptions& /*options*/) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, RejectReason::kInternal, "device",
      absl::StrCat("cuda:", index, ": this lossd was built without CUDA (no CUDA toolkit was found)"));
}

int CudaDeviceCount() { return 0; }

}  // namespace lossd::engine
