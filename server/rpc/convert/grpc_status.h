// The one place where the engine's errors become gRPC's.
#ifndef LOSSD_SERVER_RPC_CONVERT_GRPC_STATUS_H_
#define LOSSD_SERVER_RPC_CONVERT_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "server/engine/common/counters.h"

namespace lossd::rpc {

// Same code and message; PositionInfo and RetryInfo travel as rich error details (a RichStatus, which is
// google.rpc.Status on the wire). Counts the rejection by reason. Messages are cut to a length that fits
// HTTP/2 trailers.
grpc::Status ToGrpc(const absl::Status& status, engine::Counters& counters);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONVERT_GRPC_STATUS_H_
