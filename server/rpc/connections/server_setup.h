// How a gRPC server for clients is made, whatever it serves: limits of messages and connections, and who is
// let in.
#ifndef LOSSD_SERVER_RPC_CONNECTIONS_SERVER_SETUP_H_
#define LOSSD_SERVER_RPC_CONNECTIONS_SERVER_SETUP_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>

#include "server/engine/chunk/chunk.h"
#include "server/rpc/connections/connection_limits.h"
#include "server/rpc/transport/access.h"
#include "server/rpc/transport/tls_files.h"

namespace lossd::rpc {

// Buffers that gRPC reads a connection into have a bound. At the beginning of main, before the first use of
// gRPC.
//
// As it is by itself, gRPC 1.51 makes them as large as what came the last time that it did not have to wait
// for the connection: gigabytes, from who sends without a pause, and beyond 2 GiB it ends the process.
void BoundReadBuffers();

// `staging_bytes`: what sessions may have under way together.
void LimitServer(const engine::ChunkLimits& chunks, int64_t staging_bytes,
                 const ConnectionLimits& connections, grpc::ServerBuilder& builder);

// What addresses are listened on with. Tokens need credentials that calls can be looked at by: for plain text
// those of local connections, which are not encrypted either, but take none from elsewhere.
class ServerCredentials {
 public:
  // `access` is null if everybody is let in. The files of `tls` are checked (CheckTls).
  ServerCredentials(const TlsFiles& tls, const std::shared_ptr<AccessControl>& access);

  const std::shared_ptr<grpc::ServerCredentials>& For(const std::string& address) const;

 private:
  std::shared_ptr<grpc::ServerCredentials> host_;
  std::shared_ptr<grpc::ServerCredentials> socket_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONNECTIONS_SERVER_SETUP_H_
