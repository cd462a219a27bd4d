// Which of a head's replicas a server is.
#ifndef LOSSD_SERVER_ENGINE_COMMON_REPLICA_PLACE_H_
#define LOSSD_SERVER_ENGINE_COMMON_REPLICA_PLACE_H_

#include <cstdint>

namespace lossd::engine {

struct ReplicaPlace {
  static constexpr int32_t kCoordinator = 0;

  int32_t replica = 0;
  int32_t replicas = 1;

  // Windows end together with those of other servers.
  bool shared() const { return replicas > 1; }
  bool coordinates() const { return replica == kCoordinator; }
};

// Deterministic sessions of one rank, of which there is to be one, are at one replica.
inline int32_t ReplicaOfRank(int32_t rank, int32_t replicas) {
  return static_cast<int32_t>(static_cast<uint32_t>(rank) % static_cast<uint32_t>(replicas));
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_REPLICA_PLACE_H_
