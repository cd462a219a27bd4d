// Takes connections for a gRPC server.
//
// gRPC's own sockets (1.51) stop listening for good the first time that no file descriptor is left for a
// connection: a crowd of connections, of anybody who reaches the port, would shut the server up until it is
// started again. These go on. And a few descriptors are kept back, for checkpoints, certificates and probes:
// a connection that would take one of those is closed at once, so that its client learns it and tries again.
#ifndef LOSSD_SERVER_RPC_ACCEPTOR_H_
#define LOSSD_SERVER_RPC_ACCEPTOR_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/counters.h"
#include "server/rpc/file_descriptor.h"
#include "server/rpc/listener.h"
#include "server/rpc/rate_limit.h"

namespace lossd::rpc {

// Not thread-safe; has a thread of its own.
class Acceptor {
 public:
  // Probes get at descriptors that clients do not.
  enum class For { kClients, kProbes };

  // Connections that are closed for want of descriptors are counted in `refused`, which outlives it; null:
  // they are not.
  Acceptor(For whom, engine::Counter* refused) : for_(whom), refused_(refused) {}
  ~Acceptor() { Stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Connections to `address` (Listener::Open) wait from now on, to be served with `credentials`. Before the
  // server is built.
  absl::Status Listen(const std::string& address, const std::shared_ptr<grpc::ServerCredentials>& credentials,
                      grpc::ServerBuilder& builder);
  // After the server was built. UNAVAILABLE without a descriptor.
  absl::Status Start();
  // Addresses are free when it returns, and connections that nobody took closed. Before the server shuts
  // down.
  void Stop();

  int port() const;  // of the first address that has one; 0: none has

 private:
  struct Place {
    std::unique_ptr<Listener> listener;
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> server;
  };

  void Run();
  // Until none waits. False: there is no descriptor for the next.
  bool TakeAll(int listener, Place& place);
  void LogShortage(const char* connection);

  const For for_;
  engine::Counter* const refused_;
  std::vector<Place> places_;
  FileDescriptor stop_;
  RateLimit lines_{1, 0.1};  // of the thread
  std::thread thread_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_ACCEPTOR_H_
