// The standard health service on a port of its own, in plain text: for probes that have neither certificate
// nor token.
#ifndef LOSSD_SERVER_RPC_HEALTH_SERVER_H_
#define LOSSD_SERVER_RPC_HEALTH_SERVER_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/rpc/connections/acceptor.h"

namespace lossd::rpc {

// The service "" is what --listen's own is: whether work is taken. The service "liveness" is SERVING as long
// as this object lives. Nothing else can be called here.
class HealthServer {
 public:
  enum class Ready { kNo, kYes };

  // `listen` is host:port, where port 0 takes a free one; not ready yet. UNAVAILABLE if it cannot be listened
  // on.
  static absl::StatusOr<std::unique_ptr<HealthServer>> Start(const std::string& listen);
  ~HealthServer();

  int port() const { return acceptor_.port(); }
  void Set(Ready ready);

 private:
  HealthServer() = default;

  // Answers whatever is not health: UNIMPLEMENTED. gRPC starts no server without a service of one's own.
  grpc::CallbackGenericService nothing_else_;
  Acceptor acceptor_{Acceptor::For::kProbes, {}};
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_HEALTH_SERVER_H_
