// The gRPC server: services, health, reflection, and an orderly end.
#ifndef LOSSD_SERVER_RPC_SERVER_H_
#define LOSSD_SERVER_RPC_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/rpc/server_options.h"

namespace lossd::rpc {

// Server is an interface, so that its users do not compile the headers of the services.
class Server {
 public:
  // Takes the addresses. Clients that connect wait until Serve(), so that nothing has happened yet if the
  // start fails in between. `engine` outlives the server. UNAVAILABLE if an address cannot be listened on or
  // no thread can be started, ALREADY_EXISTS if a socket file is in use, INVALID_ARGUMENT if addresses or TLS
  // files are not acceptable.
  static absl::StatusOr<std::unique_ptr<Server>> Open(const ServerOptions& options, engine::Engine* engine);
  // Open() and Serve().
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options, engine::Engine* engine);
  // Drains without patience if Drain was not called.
  virtual ~Server() = default;

  // Calls are taken from now on. Once; it cannot fail.
  virtual void Serve() = 0;

  // The port of the first host:port; 0 if there is none.
  virtual int port() const = 0;
  // Where clients attach their regions; empty if there are none.
  virtual std::string region_socket_path() const = 0;

  // What health says between Serve() and Drain(): whether work is taken and comes on.
  virtual void SetReady(bool ready) = 0;
  // Once a second or so.
  virtual void Tick() = 0;
  // After the tokens of options.access have changed.
  virtual void EndRevokedStreams() = 0;

  // Health says NOT_SERVING, new work is refused, what was accepted is finished and answered, streams end
  // with UNAVAILABLE; after `timeout` whatever is left is cancelled. Connections without a call of lossd's
  // are not waited for: they are closed once watchers of health have their last answer. To be called once.
  virtual void Drain(absl::Duration timeout) = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVER_H_
