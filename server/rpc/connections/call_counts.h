// What gRPC has counted of calls, by connection (channelz).
#ifndef LOSSD_SERVER_RPC_CONNECTIONS_CALL_COUNTS_H_
#define LOSSD_SERVER_RPC_CONNECTIONS_CALL_COUNTS_H_

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "server/rpc/connections/tcp_address.h"

namespace lossd::rpc {

struct ConnectionCalls {
  int64_t id = 0;  // gRPC's number of it; later ones are larger
  TcpConnection connection;
  // Begun, and still known to gRPC: also those that were reset and not yet cleared away.
  int64_t unfinished = 0;
  int64_t reset = 0;  // ended by the client before they were answered
};

class CallCounts {
 public:
  virtual ~CallCounts() = default;
  // Since the start, of all connections. Takes microseconds.
  virtual int64_t Begun() = 0;
  // Every TCP connection that there is, by number; one that was closed stays as long as gRPC has calls of it.
  // Takes some 30 µs for each.
  virtual std::vector<ConnectionCalls> ByConnection() = 0;
};

// builder.BuildAndStart(), while no ChannelzCounts looks: gRPC lists a server before it has built it. Null if
// it does not start.
std::unique_ptr<grpc::Server> BuildAndStart(grpc::ServerBuilder& builder);

// Counts the calls of every gRPC server of this process.
class ChannelzCounts final : public CallCounts {
 public:
  int64_t Begun() override;
  std::vector<ConnectionCalls> ByConnection() override;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONNECTIONS_CALL_COUNTS_H_
