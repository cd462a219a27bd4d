// How this replica takes part in an epoch's first deed: to bring to an end, everywhere alike, what the epoch
// before has left half done.
#ifndef LOSSD_SERVER_RPC_REPLICAS_SETTLING_H_
#define LOSSD_SERVER_RPC_REPLICAS_SETTLING_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/engine/common/replica_place.h"
#include "server/engine/device/replica_communicators.h"
#include "server/engine/engine.h"
#include "server/engine/head/parts/window_end.h"
#include "server/engine/replicas/settle_replicas.h"

namespace lossd::rpc {

// What this replica has, without its history. `unfilled`: Settling's, of the epoch before.
group::v1::ReplicaHello HelloOf(const engine::Engine& engine, const std::set<std::string>& unfilled);

class Settling {
 public:
  // From what all replicas have said, in their order; all of them come to the same. FAILED_PRECONDITION or
  // INTERNAL if they cannot be replicas of the same heads: then nothing is done. A replica that is `empty`
  // begins with the heads that the others have: RESOURCE_EXHAUSTED if it cannot. What a replica has not that
  // is not empty, nobody has from here on: who creates or deletes a head does so at all of them.
  static absl::StatusOr<Settling> Decide(engine::Engine& engine, const engine::ReplicaPlace& place,
                                         const std::vector<group::v1::ReplicaHello>& hellos,
                                         const std::vector<bool>& empty);

  // Takes the steps that others have taken, lets others take theirs, and fills those that have nothing.
  // UNAVAILABLE if a replica is lost.
  absl::Status Do(const std::shared_ptr<const engine::ReplicaCommunicators>& replicas);
  // When all have done so: windows are open, but for those that all have summed, and deletions that have not
  // come to their ends are cancelled.
  void Finish(engine::Engine& engine);
  // Those, which the coordinator goes on to end, or to hold for a flush.
  std::vector<std::shared_ptr<engine::Head>> Summed() const;
  // Heads that this replica has not, since those that others have contradict each other.
  const std::set<std::string>& unfilled() const { return unfilled_; }

 private:
  struct Deed {
    std::shared_ptr<engine::Head> head;
    engine::Verdict verdict = engine::Verdict::kDrop;
    bool stepped = false;  // somebody has begun to step, which nothing undoes
    bool behind = false;   // this replica has yet to publish that step, or to commit the flush
    engine::JointStep step = {};
    bool publishes = false;       // a write that others have published
    bool drops_write = false;     // one that nobody has
    std::string flush_id = {};    // that is committed, or stays
    engine::Refill refill = {};   // nobody, if it is empty
    bool filled = false;          // this replica is
    engine::PartState part = {};  // that it has then
    bool installs = false;        // all have all of a checkpoint
    bool drops_window = false;    // which leans on one that is lost
  };
  using Parts = std::vector<std::optional<engine::PartState>>;  // by replica; none: it has nothing

  static absl::StatusOr<Deed> DeedOf(const Parts& parts, const engine::ReplicaPlace& place);

  std::vector<Deed> deeds_;  // by name: what replicas exchange must have one order everywhere
  std::set<std::string> unfilled_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_SETTLING_H_
