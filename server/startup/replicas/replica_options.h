// What a server knows of the replicas that its heads have at others.
#ifndef LOSSD_SERVER_STARTUP_REPLICAS_REPLICA_OPTIONS_H_
#define LOSSD_SERVER_STARTUP_REPLICAS_REPLICA_OPTIONS_H_

#include <string>

#include "absl/time/time.h"
#include "server/engine/common/replica_place.h"
#include "server/rpc/group/group_credentials.h"

namespace lossd {

struct ReplicaOptions {
  std::string set;  // its name; empty: there are no replicas
  engine::ReplicaPlace place;
  std::string leader;  // host:port of replica 0, as the others reach it
  absl::Duration timeout = absl::Seconds(10);
  std::string interface;  // by which they reach each other; empty: loopback
  rpc::GroupCredentials credentials;
  std::string advertised_host;  // of this server, for clients; as it stands before a port
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_REPLICAS_REPLICA_OPTIONS_H_
