// What a process knows of the group that it starts or belongs to.
#ifndef LOSSD_SERVER_STARTUP_GROUP_GROUP_OPTIONS_H_
#define LOSSD_SERVER_STARTUP_GROUP_GROUP_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/rpc/group/group_credentials.h"

namespace lossd {

// The exit status of a rank whose group has lost a rank: who started the ranks starts all of them again.
inline constexpr int kRankLost = 75;
// That of a rank whose own device has failed. The same follows.
inline constexpr int kDeviceFailed = 76;

// What the parent told a rank's process.
struct RankProcess {
  int32_t rank = 0;  // 0: the leader
  // The parent's number of it. Over several hosts ranks agree on another one (rpc::GroupIdentity).
  int64_t epoch = 1;
  std::string socket;  // of the leader's control; empty if the group spans nodes
  int parent = -1;     // ParentLink's file
};

// A group is of one node, on one host, or spans several, each with as many devices and a parent of its own.
struct GroupOptions {
  std::vector<std::string> devices;  // of this node, one a rank; empty: there is no group
  absl::Duration rank_timeout = absl::Seconds(10);
  absl::Duration start_timeout = absl::Seconds(60);
  absl::Duration short_life = absl::Seconds(10);
  std::optional<RankProcess> process;  // none, with devices: this is the parent

  int32_t node = 0;  // 0: it has the leader
  int32_t nodes = 1;
  // That of the node's first rank among the ranks of its host. Those of the leader's host have their own.
  int32_t host_rank = 0;
  bool first_of_host = true;  // of the nodes that a launcher has started there: it answers for the host
  size_t shared_out = 0;   // of so many devices of the host the node takes its own; 0: it takes all it sees
  int32_t host_ranks = 0;  // that share the memory of this host, of all its nodes
  std::string leader;  // host:port of the leader's control, as other nodes reach it; empty without --group
  // What follows is for groups that span nodes.
  std::string interface;              // by which its ranks reach each other
  rpc::GroupCredentials credentials;  // in a rank's process without the token, which its parent tells

  // Flags that have to be the same at all ranks, by their names without dashes.
  std::map<std::string, std::string> agreed;

  bool SpansNodes() const { return nodes > 1; }
  bool SpansHosts() const { return host_ranks < ranks(); }
  int32_t local_ranks() const { return static_cast<int32_t>(devices.size()); }
  int32_t first_rank() const { return node * local_ranks(); }
  bool IsBesideLeader() const { return host_rank == first_rank(); }
  int32_t ranks() const { return nodes * local_ranks(); }
  // That of a rank's process, or the first.
  const std::string& own_device() const {
    return devices[process.has_value() ? static_cast<size_t>(process->rank - first_rank()) : 0];
  }
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_GROUP_OPTIONS_H_
