// What clients meet at a rank that is not the leader: a gRPC server that takes Compute streams and passes
// them on (LaneRelay), tells its health, and refuses all else.
#ifndef LOSSD_SERVER_RPC_LANES_LANE_SERVER_H_
#define LOSSD_SERVER_RPC_LANES_LANE_SERVER_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/calls/call_reports.h"
#include "server/rpc/calls/rate_limit.h"
#include "server/rpc/connections/acceptor.h"
#include "server/rpc/connections/connection_guard.h"
#include "server/rpc/connections/server_setup.h"
#include "server/rpc/lanes/lane_relay.h"
#include "server/rpc/transport/access.h"
#include "server/rpc/transport/tls.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd::rpc {

struct LaneServerOptions {
  std::string listen = {};  // as ServerOptions::listen
  TlsFiles tls = {};
  std::shared_ptr<AccessControl> access = nullptr;  // null: everybody is let in
  ConnectionLimits connections = {};
  engine::ChunkLimits chunk_limits = {};
  int64_t staging_bytes = int64_t{2} << 30;  // of all sessions
  int64_t lane_credit_bytes = int64_t{32} << 20;
  int64_t max_streams = 4096;
  std::string leader_place = {};  // where the leader is, for people: "the leader (rank 0), ..."
  telemetry::ServiceCounters* counters = nullptr;  // of MethodNames(); outlives the server
};

// Thread-safe, but for Serve and Drain.
class LaneServer {
 public:
  // At most, of all clients: each is a call to the leader, and another one at its end, over the connection
  // that the rank itself is there by. The leader's guard must never take that for a flood.
  static constexpr int64_t kMostStreams = 480;
  static_assert(1 + 2 * kMostStreams < ConnectionGuard::kMostUnfinished);

  // Takes the addresses; clients that connect wait until Serve(). Errors as Server::Open's.
  static absl::StatusOr<std::unique_ptr<LaneServer>> Open(const LaneServerOptions& options);
  // Drains without patience if Drain was not called.
  ~LaneServer();

  int port() const { return acceptor_.port(); }  // of the first host:port; 0: there is none

  // Calls are taken from now on. Once. What it is given outlives the server.
  void Serve(LaneRelay::Stage stage, engine::RankPayloads* payloads, LeaderCalls leader);
  // What health says; not ready before the first call.
  void SetReady(bool ready);
  // Once a second or so.
  void Tick();
  // After the tokens of options.access have changed.
  void EndRevokedStreams();

  // No stream begins any more. Waits until those that there are have ended, as the leader ends them; after
  // `timeout` what is left is cancelled. Once.
  void Drain(absl::Duration timeout);

 private:
  using Stream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  // Every call that is none of gRPC's own services.
  class Calls final : public grpc::CallbackGenericService {
   public:
    explicit Calls(LaneServer* server) : server_(server) {}
    grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
      return server_->Begin(context);
    }

   private:
    LaneServer* const server_;
  };
  struct Live {
    std::weak_ptr<LaneRelay> relay;
    std::optional<TokenHash> token;
  };

  explicit LaneServer(const LaneServerOptions& options);
  absl::Status Listen(const LaneServerOptions& options);
  Stream* Begin(grpc::GenericCallbackServerContext* context) ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::pair<std::shared_ptr<LaneRelay>, std::optional<TokenHash>>> Relays()
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Forget(LaneRelay* relay) ABSL_LOCKS_EXCLUDED(mutex_);
  bool AwaitRelays(std::optional<absl::Duration> timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<const AccessControl> access_;
  const int64_t max_streams_;
  CallReports reports_;
  engine::Counters counters_;           // nobody asks for them: the leader counts
  std::atomic<int64_t> under_way_ = 0;  // bytes, of all lanes
  LaneRelay::Rank rank_;                // whole from Serve on
  std::atomic<uint64_t> last_relay_ = 0;

  engine::Mutex mutex_;
  engine::CondVar none_left_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<LaneRelay*, Live> live_ ABSL_GUARDED_BY(mutex_);
  // Streams that begin: each may end in a reset of a call to the leader.
  RateLimit begun_ ABSL_GUARDED_BY(mutex_){1000, 100};

  Calls calls_{this};
  Acceptor acceptor_;
  bool drained_ = false;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_LANES_LANE_SERVER_H_
