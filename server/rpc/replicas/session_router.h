// Sessions of a head over replicas: where each is opened, and how calls about it come there.
#ifndef LOSSD_SERVER_RPC_REPLICAS_SESSION_ROUTER_H_
#define LOSSD_SERVER_RPC_REPLICAS_SESSION_ROUTER_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lossd/group/v1/replica.pb.h"
#include "lossd/v1/loss.pb.h"
#include "server/engine/common/mutex.h"
#include "server/engine/common/replica_place.h"
#include "server/engine/common/worker_pool.h"
#include "server/engine/engine.h"
#include "server/rpc/replicas/passed_calls.h"
#include "server/rpc/replicas/replica_questions.h"
#include "server/rpc/services/session_placer.h"

namespace lossd::rpc {

// What this server does of sessions by itself, as other replicas ask it.
struct SessionCalls {
  std::function<absl::Status(const v1::OpenSessionRequest&, v1::OpenSessionResponse*)> open;
  std::function<absl::Status(const v1::CloseSessionRequest&)> close;
};

// Thread-safe.
class SessionRouter final : public SessionPlacer {
 public:
  // How it reaches the others.
  struct Set {
    FindCoordinator coordinator;                            // at other replicas than it
    std::function<absl::StatusOr<OtherReplicas>()> others;  // at it
    std::function<uint64_t()> history;
  };
  SessionRouter(engine::ReplicaPlace place, Set set) : place_(place), set_(std::move(set)) {}

  // From here on, until StopServing, sessions can be opened here. The engine outlives that.
  void Serve(engine::Engine* engine, SessionCalls calls) ABSL_LOCKS_EXCLUDED(mutex_);
  void StopServing() ABSL_LOCKS_EXCLUDED(mutex_);

  void OpenSession(const grpc::CallbackServerContext& context, const v1::OpenSessionRequest& request,
                   Opened done) override;
  void CloseSession(const grpc::CallbackServerContext& context, const v1::CloseSessionRequest& request,
                    Closed done) override;
  absl::Status AddOthers(v1::Head* head) override;
  int32_t replica() const override { return place_.replica; }
  uint64_t history() const override { return set_.history(); }

  // Whether it is a command about sessions, and what the reply to it says.
  static bool Takes(const group::v1::ReplicaCommand& command);
  absl::StatusOr<std::string> Do(const group::v1::ReplicaCommand& command);

 private:
  struct Served {
    engine::Engine* engine;
    SessionCalls calls;
  };

  absl::StatusOr<std::shared_ptr<const Served>> served() const ABSL_LOCKS_EXCLUDED(mutex_);
  // At the coordinator; they wait for others.
  absl::StatusOr<v1::OpenSessionResponse> Place(const v1::OpenSessionRequest& request);
  absl::Status CloseAt(int32_t replica, const v1::CloseSessionRequest& request);
  // Asks the coordinator, as the client of `context`.
  template <class Request, class Response>
  void Pass(const grpc::CallbackServerContext& context, const char* path, const Request& request,
            std::function<void(const grpc::Status&, Response)> done);
  grpc::Status ToGrpcStatus(const absl::Status& status) const;

  const engine::ReplicaPlace place_;
  const Set set_;
  mutable engine::Mutex mutex_;
  std::shared_ptr<const Served> served_ ABSL_GUARDED_BY(mutex_);
  engine::WorkerPool placing_{1};  // one after the other: each sees what those before it have opened
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_SESSION_ROUTER_H_
