// Which replica of its heads a server is.
#ifndef LOSSD_SERVER_STARTUP_REPLICAS_REPLICA_FINDER_H_
#define LOSSD_SERVER_STARTUP_REPLICAS_REPLICA_FINDER_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/startup/group/launcher.h"

namespace lossd {

// Where replica 0 is reached by the others if nothing else is said.
inline constexpr int kReplicaPort = 50054;

struct FoundReplica {
  int32_t replica = 0;
  std::string leader;  // host:port of replica 0, as the others reach it
};

// `said` is --replica's value: a number, or who tells it.
//   lws            the group's number in its LeaderWorkerSet, LWS_GROUP_INDEX; replica 0 is group 0's leader
//   stateful_set   the number at the end of the pod's name, `host`; replica 0 is the same name with 0
// `leader` is --replica_leader's, HOST or HOST:PORT, which wins; empty: it is not given. `host`: this host's
// name, with its domain if it has one. INVALID_ARGUMENT, naming what is missing or makes no sense, and what
// to do.
absl::StatusOr<FoundReplica> FindReplica(const std::string& said, const std::string& leader,
                                         const Environment& environment, const std::string& host);

// This host's name as the network knows it: "lossd-1.lossd.default.svc.cluster.local" in a pod of a
// StatefulSet.
std::string FullHostName();

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_REPLICAS_REPLICA_FINDER_H_
