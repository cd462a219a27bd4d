// Connection over gRPC.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_GRPC_CONNECTION_H_
#define LOSSD_CLIENT_SRC_CONNECTION_GRPC_CONNECTION_H_

#include <memory>
#include <string>

#include "client/src/connection/connection.h"

namespace lossd::internal {

// Does not wait for the server. INVALID_ARGUMENT for options that cannot work.
absl::StatusOr<std::unique_ptr<Connection>> MakeGrpcConnection(const std::string& target,
                                                               const ClientOptions& options);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_GRPC_CONNECTION_H_
