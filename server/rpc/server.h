// The gRPC server: services, health, reflection, and an orderly end.
#ifndef LOSSD_SERVER_RPC_SERVER_H_
#define LOSSD_SERVER_RPC_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/rpc/calls/call_reports.h"
#include "server/rpc/connections/acceptor.h"
#include "server/rpc/connections/server_setup.h"
#include "server/rpc/lanes/relay_service.h"
#include "server/rpc/lanes/relayed_requests.h"
#include "server/rpc/replicas/passed_calls.h"
#include "server/rpc/replicas/replica_set.h"
#include "server/rpc/services/gradient_service.h"
#include "server/rpc/services/head_service.h"
#include "server/rpc/services/loss_service.h"
#include "server/rpc/services/region_service.h"
#include "server/rpc/services/row_stream_reactor.h"
#include "server/rpc/services/status_service.h"
#include "server/rpc/transport/access.h"
#include "server/rpc/transport/region_socket.h"
#include "server/rpc/transport/tls.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd::rpc {

struct ServerOptions {
  // One or more, with commas: host:port, where port 0 takes a free one, or unix:PATH.
  std::string listen = "127.0.0.1:50051";
  TlsFiles tls = {};                   // of host:port; a socket file is guarded by its permissions
  std::string region_socket_dir = {};  // RegionSocket's, if the engine has regions
  std::string weights_dir = {};        // WeightLoader's folder
  int64_t row_message_bytes = kRowMessageBytes;
  std::function<void()> on_drain = {};              // StatusService's
  telemetry::ServiceCounters* counters = nullptr;   // of MethodNames(); outlives the server
  std::shared_ptr<AccessControl> access = nullptr;  // who is let in; null: everybody
  ConnectionLimits connections = {};
  // At a group's leader: what lanes that clients open at other ranks come by, and where they do. `relays` is
  // null if they do not, and outlives the server.
  RelayService* relays = nullptr;
  RelayedRequests::Group group = {};
  std::vector<RankLanes> lanes = {};  // from rank 1 on
  // Its place among replicas, which the others may call from Serve() to Drain(); outlives the server. Null:
  // there are none.
  ReplicaSet* replicas = nullptr;
  // The host by which clients reach this one, where another replica has sent them; with `listen`'s first
  // port.
  std::string advertised_host = {};
};

class Server {
 public:
  // Takes the addresses. Clients that connect wait until Serve(), so that nothing has happened yet if the
  // start fails in between. `engine` outlives the server. UNAVAILABLE if an address cannot be listened on or
  // no thread can be started, ALREADY_EXISTS if a socket file is in use, INVALID_ARGUMENT if addresses or TLS
  // files are not acceptable.
  static absl::StatusOr<std::unique_ptr<Server>> Open(const ServerOptions& options, engine::Engine* engine);
  // Calls are taken from now on. Once; it cannot fail.
  void Serve();
  // Both.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options, engine::Engine* engine);
  // Drains without patience if Drain was not called.
  ~Server();

  // The port of the first host:port; 0 if there is none.
  int port() const { return acceptor_.port(); }
  // Where clients attach their regions; empty if there are none.
  std::string region_socket_path() const { return region_socket_ == nullptr ? "" : region_socket_->path(); }

  // What health says between Serve() and Drain(): whether work is taken and comes on.
  void SetReady(bool ready);
  // Once a second or so.
  void Tick() { loss_service_.CancelStuckStreams(); }
  // After the tokens of options.access have changed.
  void EndRevokedStreams() { loss_service_.EndRevokedStreams(); }

  // Health says NOT_SERVING, new work is refused, what was accepted is finished and answered, streams end
  // with UNAVAILABLE; after `timeout` whatever is left is cancelled. Connections without a call of lossd's
  // are not waited for: they are closed once watchers of health have their last answer. To be called once.
  void Drain(absl::Duration timeout);

 private:
  Server(engine::Engine* engine, const ServerOptions& options);
  void RegisterServices(grpc::ServerBuilder& builder);
  void ServeReplicas();
  absl::Status Listen(const ServerOptions& options, grpc::ServerBuilder& builder);
  // Until the drain is over: closes connections as soon as no call is under way.
  void CloseStrangers();

  engine::Engine* const engine_;
  const std::unique_ptr<telemetry::ServiceCounters> own_counters_;  // null: the caller has some
  telemetry::ServiceCounters* const counters_;
  CallReports reports_;
  HeadService head_service_;
  LossService loss_service_;
  GradientService gradient_service_;
  StatusService status_service_;
  RegionService region_service_;
  std::unique_ptr<RegionSocket> region_socket_;
  Acceptor acceptor_;
  RelayService* const relays_;
  const RelayedRequests::Group group_;
  ReplicaSet* const replicas_;
  const std::string advertised_host_;
  std::unique_ptr<PassedCalls> passed_calls_;  // null: all calls are served here
  bool drained_ = false;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVER_H_
