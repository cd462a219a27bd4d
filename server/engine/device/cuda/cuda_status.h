// The border between CUDA's errors and the engine's.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_STATUS_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_STATUS_H_

#include "absl/status/status.h"
#include "kernels/collectives/communicator.h"
#include "kernels/cuda/memory/result.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/rank_status.h"

namespace lossd::engine {

inline absl::Status ToStatus(absl::StatusCode code, const kernels::cuda::Result& result) {
  if (result.ok()) return absl::OkStatus();
  return MakeError(code, RejectReason::kInternal, "device", result.message());
}

inline absl::Status DeviceFailed(const kernels::cuda::Result& result) {
  return ToStatus(absl::StatusCode::kInternal, result);
}
// UNAVAILABLE, with what the communicator says, if it is that which has failed.
inline absl::Status DeviceFailed(const kernels::cuda::Result& result,
                                 const kernels::collectives::Communicator* communicator) {
  if (communicator == nullptr || communicator->failure().ok()) return DeviceFailed(result);
  return ToStatus(communicator->failure());
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_STATUS_H_
