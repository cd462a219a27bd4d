// How calls between ranks fail, as the engine says it.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_RANK_STATUS_H_
#define LOSSD_SERVER_ENGINE_DEVICE_RANK_STATUS_H_

#include "absl/status/status.h"
#include "kernels/collectives/result.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {

// With what the communicator said: INTERNAL if it is the device of this rank that has failed, else
// UNAVAILABLE.
inline absl::Status ToStatus(const kernels::collectives::Result& result) {
  if (result.ok()) return absl::OkStatus();
  const bool device = result.code() == kernels::collectives::Code::kDeviceFailed;
  return MakeError(device ? absl::StatusCode::kInternal : absl::StatusCode::kUnavailable,
                   RejectReason::kInternal, "", result.message());
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_RANK_STATUS_H_
