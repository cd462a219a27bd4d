// One server's place among the replicas of its heads: it meets the others, again and again whenever one was
// lost, and in between ends windows together with them. docs/decisions/0022-replicas.md.
#ifndef LOSSD_SERVER_RPC_REPLICAS_REPLICA_SET_H_
#define LOSSD_SERVER_RPC_REPLICAS_REPLICA_SET_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/common/replica_place.h"
#include "server/engine/engine.h"
#include "server/engine/replicas/joint_replicas.h"
#include "server/rpc/group/group_credentials.h"
#include "server/rpc/group/group_identity.h"
#include "server/rpc/replicas/passed_calls.h"
#include "server/rpc/replicas/session_router.h"

namespace lossd::rpc {

struct ReplicaSetOptions {
  engine::ReplicaPlace place;
  // The coordinator's: where it listens for the others, and they reach it (GroupLeaderOptions).
  std::string address;
  GroupCredentials credentials;
  // What replicas must agree on: the number of them (`ranks`), and flags. Its epoch is ignored.
  GroupIdentity identity;
  // Who is silent for so long is lost.
  absl::Duration replica_timeout = absl::Seconds(10);
  // By which devices reach each other; empty: the loopback interface.
  std::string interface = {};
};

// Thread-safe. A head's windows can be ended while all replicas are there and have it.
class ReplicaSet {
 public:
  static std::unique_ptr<ReplicaSet> Create(ReplicaSetOptions options);
  // Leaves. The engine lives, or was never given.
  virtual ~ReplicaSet() = default;

  // Begins to look for the others. Once; the engine has this place, and outlives the set.
  virtual void Meet(engine::Engine* engine) = 0;

  // EngineOptions::end_together; windows end one after the other. UNAVAILABLE, naming who is missing, for who
  // waits at the head if not all replicas are there.
  virtual void EndTogether(std::shared_ptr<engine::Head> head, engine::WindowEnd end) = 0;

  // EngineOptions'. A write is prepared here, and waits until it is published at all or given up.
  virtual void PublishTogether(std::shared_ptr<engine::Head> head,
                               std::shared_ptr<engine::StagedWrite> write) = 0;
  virtual absl::Status CreateTogether(const engine::HeadConfig& config) = 0;
  virtual absl::Status CopyTogether(const engine::HeadCopy& copy,
                                    absl::FunctionRef<absl::Status()> copy_here) = 0;
  virtual absl::StatusOr<bool> DeleteTogether(const std::string& name,
                                              engine::Engine::DiscardGradient discard,
                                              absl::FunctionRef<absl::Status()> delete_here) = 0;

  // The server takes calls from here on, until StopServing: sessions by `sessions`, and at the coordinator
  // those that others pass on at `own`, a channel to it.
  virtual void Serve(SessionCalls sessions, std::shared_ptr<grpc::Channel> own) = 0;
  virtual void StopServing() = 0;
  // For PassedCalls, at replicas that are not the coordinator.
  virtual absl::StatusOr<CoordinatorCalls> Coordinator() const = 0;
  // For clients' calls about sessions.
  virtual SessionRouter& sessions() = 0;

  virtual const engine::ReplicaPlace& place() const = 0;
  // Waits until all are there and alike; false if `told_to_end` says so meanwhile.
  virtual bool AwaitMeeting(const std::function<bool()>& told_to_end) = 0;
  // EngineOptions::find_part, at the coordinator: UNAVAILABLE, naming who is missing, if not all are there.
  virtual absl::StatusOr<std::shared_ptr<engine::ReplicaPart>> FindPart(const engine::Head& head,
                                                                        int32_t replica) = 0;

  // EngineOptions::find_replicas.
  virtual absl::StatusOr<engine::JointReplicas> FindReplicas(const engine::Head& head) = 0;

  // At the coordinator, when it begins to drain and is going to save: those that drain as well are to stay.
  virtual void TellDraining() = 0;
  // When it takes nothing any more: waits until they do neither, and for a moment, or until `deadline`, for
  // those that have yet to be told. UNAVAILABLE if not all are there.
  virtual absl::Status AwaitOthersDrained(absl::Time deadline) = 0;
  // At the others, when this server takes nothing any more: stays until the coordinator has left, which may
  // save, or until `deadline`; only for a moment unless the coordinator drains as well. Whether it does.
  virtual bool StayForDrain(absl::Time deadline) = 0;

  // OK while all are there; else why not.
  virtual absl::Status Whole() const = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_REPLICA_SET_H_
