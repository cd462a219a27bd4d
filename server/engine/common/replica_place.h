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

// The history of a head over replicas as clients compare it: that of the set, which all its heads have, and
// how often this one was put back to a checkpoint.
inline uint64_t HistoryOf(uint64_t set, uint64_t restores) {
  return set == 0 ? 0 : set + restores * 0x9E3779B97F4A7C15U;
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_REPLICA_PLACE_H_
