// What the replicas of a set agree on when all of them have met: docs/decisions/0022-replicas.md. The
// protocol is tests/model/replicas.pml, where this is agree().
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_AGREEMENT_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_AGREEMENT_H_

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "server/engine/head/replica/checkpoint_part.h"

namespace lossd::engine {

// One replica, as it describes itself.
struct MetReplica {
  struct MetHead {
    uint64_t fingerprint = 0;  // of its configuration
    MetPart part;

    bool operator==(const MetHead&) const = default;
  };

  // The number of the set that it has settled with; 0: it has settled with none. Another one after each time
  // that a replica has come in the place of one that was lost.
  uint64_t history = 0;
  std::map<std::string, MetHead> heads = {};  // by name
};

struct Agreement {
  uint64_t history = 0;
  std::vector<std::string> alike;    // heads that go on as they are
  std::vector<std::string> go_back;  // to their newest checkpoints
  std::set<std::string> empty;       // those of them of which no replica has weights
};

// All replicas come to the same from what all of them have said; at least one. A head goes on if all have
// been together since the same moment, and have it with one configuration, at one place and unbroken.
// `new_history`: what the set's is if they have not been.
Agreement Agree(std::span<const MetReplica> replicas, uint64_t new_history);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_AGREEMENT_H_
