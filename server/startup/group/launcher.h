// Where a process stands among those that a group over hosts is started with.
#ifndef LOSSD_SERVER_STARTUP_GROUP_LAUNCHER_H_
#define LOSSD_SERVER_STARTUP_GROUP_LAUNCHER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd {

// Where the leader's control is reached if nothing else is said.
inline constexpr int kGroupPort = 50053;

// A node is a process that starts ranks; nodes of one launcher are all on one host, or on many.
struct NodePlace {
  int32_t node = 0;  // 0: its first rank leads the group
  int32_t nodes = 1;
  std::string leader;  // host:port, or [IPv6]:port
  // Among the nodes that the launcher has started on this host.
  int32_t local_index = 0;
  int32_t local_count = 1;
  bool own_gpus = false;  // the launcher shows each of them its own GPUs alone
};

// What the flags say of it, which wins over what the launcher says.
struct GivenPlace {
  std::optional<int32_t> node;   // --group_node
  std::optional<int32_t> nodes;  // --group_nodes
  std::string leader;            // --group_leader: HOST or HOST:PORT; empty: not given
};

// A variable of the environment; none if it is not set, or empty.
using Environment = std::function<std::optional<std::string>(const char* name)>;
Environment ProcessEnvironment();

// `launcher` is --group's value: flags, lws, torchrun, slurm or ompi. Nothing but that launcher's variables
// is looked at. INVALID_ARGUMENT, naming what is missing or makes no sense, and what to do.
absl::StatusOr<NodePlace> FindPlace(const std::string& launcher, const GivenPlace& given,
                                    const Environment& environment);

// HOST:PORT of `leader`, HOST or HOST:PORT, which `from` says. INVALID_ARGUMENT if it is neither.
absl::StatusOr<std::string> AddressOf(const std::string& from, absl::string_view leader, int default_port);

// The first of a Slurm list of hosts: "gpu01" of "gpu[01-03,7]-x,login". INVALID_ARGUMENT if it is none.
absl::StatusOr<std::string> FirstHost(const std::string& list);

// How many tasks Slurm has on host `index`: 2 on 0 to 2 and 1 on 3 for "2(x3),1". INVALID_ARGUMENT if the
// list is none, or has no such host.
absl::StatusOr<int32_t> TasksOfHost(const std::string& list, int32_t index);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_LAUNCHER_H_
