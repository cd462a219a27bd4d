// The flags of a set of replicas.
#ifndef LOSSD_SERVER_STARTUP_REPLICA_FLAGS_H_
#define LOSSD_SERVER_STARTUP_REPLICA_FLAGS_H_

#include "absl/status/statusor.h"
#include "server/startup/replicas/replica_options.h"

namespace lossd {

// INVALID_ARGUMENT naming the flag or the launcher's variable, and what to do.
absl::StatusOr<ReplicaOptions> ReadReplicaFlags();

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_REPLICA_FLAGS_H_
