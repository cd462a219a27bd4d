#include "server/rpc/replicas/met_heads.h"

#include <memory>
#include <string>
#include <utility>

#include "server/engine/replicas/joint_replicas.h"
#include "server/rpc/replicas/replica_wire.h"

namespace lossd::rpc {

engine::MetReplica DescribeHeads(engine::Engine& engine, uint64_t history) {
  engine::MetReplica own{.history = history, .heads = {}};
  const bool coordinates = engine.options().place.coordinates();
  for (const std::shared_ptr<engine::Head>& head : engine.Heads()) {
    engine::MetPart part = head->MeetPart();
    if (coordinates && !part.broken) part.broken = engine.IsHalfRestored(*head);
    own.heads[head->config().name] = {FingerprintOf(head->config()), std::move(part)};
  }
  return own;
}

void GoOnOrAbandon(engine::Engine& engine, const engine::Agreement& agreement) {
  const bool coordinates = engine.options().place.coordinates();
  for (const std::string& name : agreement.alike) {
    const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine.FindHead(name);
    if (!head.ok()) continue;
    (*head)->GoOnPart(engine::ReplicaLost("a replica was lost meanwhile; ask again"));
    // The coordinator's own are its calls'.
    if (!coordinates) (*head)->CancelDeletion();
  }
  for (const std::string& name : agreement.go_back) {
    const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine.FindHead(name);
    if (!head.ok()) continue;
    (*head)->AbandonPart(engine::ReplicaLost(
        "a replica was lost meanwhile, and the head goes back to its newest checkpoint; ask again"));
    if (!coordinates) (*head)->CancelDeletion();
  }
}

}  // namespace lossd::rpc
