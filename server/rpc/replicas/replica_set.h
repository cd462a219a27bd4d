// One server's place among the replicas of its heads: it meets the others, again and again whenever one was
// lost, and in between ends windows together with them. docs/decisions/0022-replicas.md.
#ifndef LOSSD_SERVER_RPC_REPLICAS_REPLICA_SET_H_
#define LOSSD_SERVER_RPC_REPLICAS_REPLICA_SET_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/common/replica_place.h"
#include "server/engine/engine.h"
#include "server/rpc/group/group_credentials.h"
#include "server/rpc/group/group_identity.h"

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

  // EngineOptions::end_together. UNAVAILABLE, naming who is missing, for who waits at the head if not all
  // replicas are there.
  virtual void EndTogether(std::shared_ptr<engine::Head> head, engine::WindowEnd end) = 0;

  // OK while all are there; else why not.
  virtual absl::Status Whole() const = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_REPLICA_SET_H_
