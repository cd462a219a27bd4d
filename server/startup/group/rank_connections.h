// What the ranks of a group move rows with.
#ifndef LOSSD_SERVER_STARTUP_GROUP_RANK_CONNECTIONS_H_
#define LOSSD_SERVER_STARTUP_GROUP_RANK_CONNECTIONS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/sharded/shard_head.h"
#include "server/startup/group/group_options.h"

namespace lossd {

// Owns a rank's communicators, and what watches it; outlives what is made with its place. Move-only.
class RankConnections {
 public:
  // Connects this rank with all others, which call this too; returns when they are connected. `device` is its
  // own: where that is the host, one communicator moves everything. UNAVAILABLE, with what the communicator
  // said. What is made with the place goes on to use `rendezvous`, which outlives it, for other replicas.
  static absl::StatusOr<RankConnections> Connect(const engine::Device& device, const GroupOptions& group,
                                                 kernels::collectives::Rendezvous& rendezvous);

  engine::RankPlace place() const;

 private:
  using Communicator = kernels::collectives::Communicator;

  RankConnections(int32_t host_ranks, kernels::collectives::Rendezvous& rendezvous)
      : host_ranks_(host_ranks), rendezvous_(&rendezvous) {}

  int32_t host_ranks_;
  kernels::collectives::Rendezvous* rendezvous_;
  std::unique_ptr<Communicator> host_;
  std::unique_ptr<Communicator> device_;  // null: the host's
  std::unique_ptr<engine::RankWatch> watch_ = std::make_unique<engine::RankWatch>();
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_RANK_CONNECTIONS_H_
