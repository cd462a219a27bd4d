// How a server takes its place among the replicas of its heads.
#ifndef LOSSD_SERVER_STARTUP_REPLICAS_JOIN_REPLICAS_H_
#define LOSSD_SERVER_STARTUP_REPLICAS_JOIN_REPLICAS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/rpc/replicas/replica_set.h"
#include "server/startup/replicas/replica_options.h"

namespace lossd {

// What replicas have to have in common.
struct ReplicaLikeness {
  std::string device_kind;                    // "cuda"
  int32_t ranks = 1;                          // of the group that each is
  std::map<std::string, std::string> agreed;  // flags, by their names without dashes
};

// The set, for the engine that is made with `engine`, which is told of it. FAILED_PRECONDITION if the others
// could not reach replica 0 where it would listen.
absl::StatusOr<std::unique_ptr<rpc::ReplicaSet>> JoinReplicas(const ReplicaOptions& options,
                                                              ReplicaLikeness likeness,
                                                              engine::EngineOptions* engine);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_REPLICAS_JOIN_REPLICAS_H_
