// The one place where the engine's errors become gRPC's.
#ifndef LOSSD_SERVER_RPC_CONVERT_GRPC_STATUS_H_
#define LOSSD_SERVER_RPC_CONVERT_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "server/engine/common/counters.h"

namespace lossd::rpc {

// Same code and message, and a RichStatus (google.rpc.Status on the wire) in the error details of every
// error: clients tell by it that no proxy made the status. PositionInfo and RetryInfo travel in it. Counts
// the rejection by reason. Messages are cut to a length that fits HTTP/2 trailers.
grpc::Status ToGrpc(const absl::Status& status, engine::Counters& counters);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONVERT_GRPC_STATUS_H_
