#include "server/startup/replica_flags.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "server/engine/checkpoint/checkpoint.h"
#include "server/engine/chunk/head_config.h"
#include "server/rpc/transport/listen_address.h"
#include "server/startup/flag_checks.h"
#include "server/startup/group/network_interface.h"
#include "server/startup/group_flags.h"
#include "server/startup/replicas/replica_finder.h"

ABSL_FLAG(
    std::string, replica_set, "",
    "name of a set of servers that hold replicas of the same heads: each has sessions of its own, and a "
    "step or a flush is of all their gradients. Empty: this server's heads are its own");
ABSL_FLAG(int32_t, replicas, 0, "how many servers the set has, 2 to 1024, each with as many --devices");
ABSL_FLAG(std::string, replica, "",
          "which of them this is, from 0: a number, or who tells it: lws (LeaderWorkerSet's group) or "
          "stateful_set (the pod's name)");
ABSL_FLAG(std::string, replica_leader, "",
          absl::StrCat("HOST or HOST:PORT of replica 0, as the others reach it; the port is ",
                       lossd::kReplicaPort, " if none is given. lws and stateful_set know it"));
ABSL_FLAG(
    absl::Duration, replica_timeout, absl::Seconds(10),
    "a replica that is silent for so long is lost: no window ends until it, or another in its place, is "
    "back; at least 1s");

namespace lossd {
namespace {

bool AnyGiven() {
  return absl::GetFlag(FLAGS_replicas) != 0 || !absl::GetFlag(FLAGS_replica).empty() ||
         !absl::GetFlag(FLAGS_replica_leader).empty();
}

// What a job has; each of them is in every round and every list of all.
constexpr int32_t kMostReplicas = 1024;

absl::Status ReadPlace(ReplicaOptions& options) {
  const std::string said = absl::GetFlag(FLAGS_replica);
  const int32_t replicas = absl::GetFlag(FLAGS_replicas);
  if (!engine::IsName(options.set)) {
    return Invalid(absl::StrCat("--replica_set is '", options.set,
                                "'; it must be 1 to 128 characters of [A-Za-z0-9._-] and start with a letter "
                                "or a digit"));
  }
  if (replicas < 2 || replicas > kMostReplicas || said.empty()) {
    return Invalid(absl::StrCat("--replica_set is ", options.set, " and --replicas is ", replicas,
                                ", --replica '", said, "'; it needs how many replicas there are, from 2 to ",
                                kMostReplicas, ", and which this one is"));
  }
  absl::StatusOr<FoundReplica> found =
      FindReplica(said, absl::GetFlag(FLAGS_replica_leader), ProcessEnvironment(), FullHostName());
  if (!found.ok()) return found.status();
  if (found->replica >= replicas) {
    return Invalid(absl::StrCat("this is replica ", found->replica, " of ", replicas,
                                " (--replica and --replicas): they have the numbers from 0 to ",
                                replicas - 1));
  }
  options.place = {.replica = found->replica, .replicas = replicas};
  options.leader = std::move(found->leader);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ReplicaOptions> ReadReplicaFlags() {
  ReplicaOptions options;
  options.set = absl::GetFlag(FLAGS_replica_set);
  if (options.set.empty()) {
    if (!AnyGiven()) return options;
    return Invalid(
        "--replicas, --replica or --replica_leader is given without --replica_set, the name of the set");
  }
  if (absl::Status place = ReadPlace(options); !place.ok()) return place;
  options.timeout = absl::GetFlag(FLAGS_replica_timeout);
  absl::Status right = CheckDuration("replica_timeout", options.timeout, absl::Seconds(1));
  if (!right.ok()) return right;
  if (absl::Status can = CheckInterfaces(); !can.ok()) return can;
  const bool one_host = rpc::IsLoopback(options.leader);
  if (absl::Status network = ReadNetworkOfReplicas(one_host, &options.interface); !network.ok()) {
    return network;
  }
  if (absl::Status known = ReadGroupCredentials("--replica_set", &options.credentials); !known.ok()) {
    return known;
  }
  const absl::StatusOr<std::string> host = AdvertisedHost(options.interface);
  if (!host.ok()) return host.status();
  options.advertised_host = *host;
  return options;
}

}  // namespace lossd
