// How the ranks of a group find those of their number in the groups of other replicas: their leader asks for
// all of them where the leaders meet.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SHARDED_REPLICA_RENDEZVOUS_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SHARDED_REPLICA_RENDEZVOUS_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/collectives/rendezvous.h"
#include "server/engine/device/sharded/shard_head.h"

namespace lossd::engine {

// One connection's, and one thread's. Every rank of the group has one, connects by it, as Device has it, and
// calls Finish: until then all of them make rounds of the group's rendezvous together, whatever each of them
// comes to.
class ReplicaRendezvous final : public kernels::collectives::Rendezvous {
 public:
  // `replicas` is where the leaders meet; null at the other ranks.
  ReplicaRendezvous(const RankPlace& place, kernels::collectives::Rendezvous* replicas)
      : place_(place), replicas_(replicas) {}

  // Sets *all to what the ranks of this number gave, by replica. Fails at all ranks if one of the group has
  // come to an error, or to an end without this round; `timeout` is the leader's.
  kernels::collectives::Result AllGather(std::string own, std::chrono::milliseconds timeout,
                                         std::vector<std::string>* all) override;

  // Tells the other ranks what connecting has come to here, and returns when all have come to something: the
  // first error of any rank. INTERNAL if a rank's device has failed.
  absl::Status Finish(const absl::Status& own);

 private:
  enum class Said : char { kOffer = 'o', kDone = 'd', kFailed = 'f', kDeviceFailed = 'x' };
  static std::string Letter(Said what) { return std::string(1, static_cast<char>(what)); }
  // The rounds of the group's that it takes to say one thing, and what its leader makes of all that was said.
  // Behind anything but an offer that all have made there are no more.
  kernels::collectives::Result Say(Said what, const std::string& text, std::chrono::milliseconds timeout,
                                   std::string* verdict);
  // The leader's.
  std::string Judge(const std::vector<std::string>& said, std::chrono::milliseconds timeout);

  const RankPlace place_;
  kernels::collectives::Rendezvous* const replicas_;
  kernels::collectives::Result over_;  // not ok: why there are no more rounds
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SHARDED_REPLICA_RENDEZVOUS_H_
