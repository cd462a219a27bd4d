#include "server/startup/group/launcher.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace lossd {
namespace {

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

// How a launcher says what it knows. Each of a list is asked for until one is set.
struct Launcher {
  const char* name;
  std::vector<const char*> node = {};
  std::vector<const char*> nodes = {};
  std::vector<const char*> local_index = {};  // empty: it starts one process a host
  std::vector<const char*> local_count = {};
  std::vector<const char*> leader = {};  // empty: it does not say
  const char* own_gpus = nullptr;  // is set where each process is shown its own GPUs alone; null: no such
  const char* set_by = "";
  // Its leader is a list of hosts, and its local count one by host.
  bool slurm_lists = false;
};

const std::vector<Launcher>& Launchers() {
  static const auto* const launchers = new std::vector<Launcher>{
      {.name = "flags"},
      {.name = "lws",
       .node = {"LWS_WORKER_INDEX"},
       .nodes = {"LWS_GROUP_SIZE"},
       .leader = {"LWS_LEADER_ADDRESS"},
       .set_by = "LeaderWorkerSet (0.6 or later) sets it in the containers of its pods"},
      {.name = "torchrun",
       .node = {"RANK"},
       .nodes = {"WORLD_SIZE"},
       .local_index = {"LOCAL_RANK"},
       .local_count = {"LOCAL_WORLD_SIZE"},
       .leader = {"MASTER_ADDR"},
       .set_by = "torchrun sets it for what it starts: torchrun --no-python ... lossd --group=torchrun"},
      {.name = "slurm",
       .node = {"SLURM_PROCID"},
       .nodes = {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
       .local_index = {"SLURM_LOCALID"},
       .local_count = {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"},
       .leader = {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"},
       .own_gpus = "SLURM_GPUS_PER_TASK",
       .set_by = "srun sets it for the tasks that it starts: srun ... lossd --group=slurm",
       .slurm_lists = true},
      {.name = "ompi",
       .node = {"OMPI_COMM_WORLD_RANK"},
       .nodes = {"OMPI_COMM_WORLD_SIZE"},
       .local_index = {"OMPI_COMM_WORLD_LOCAL_RANK"},
       .local_count = {"OMPI_COMM_WORLD_LOCAL_SIZE"},
       .set_by = "Open MPI's mpirun sets it for what it starts: mpirun ... lossd --group=ompi"},
  };
  return *launchers;
}

// Reads one launcher's variables.
class Variables {
 public:
  Variables(const Launcher& launcher, const Environment& environment)
      : launcher_(launcher), environment_(environment) {}

  struct Variable {
    const char* name;
    std::string value;
  };
  // `instead` is the flag that says the same; empty: none does.
  absl::StatusOr<Variable> Text(const std::vector<const char*>& names, const char* instead) const {
    for (const char* name : names) {
      if (std::optional<std::string> value = environment_(name)) return Variable{name, *std::move(value)};
    }
    return Invalid(absl::StrCat("--group is ", launcher_.name, ", and ", names.front(), " is not set. ",
                                launcher_.set_by, *instead == '\0' ? "" : "; or give ", instead));
  }

  absl::StatusOr<int32_t> Number(const std::vector<const char*>& names, const char* instead) const {
    const absl::StatusOr<Variable> text = Text(names, instead);
    if (!text.ok()) return text.status();
    int32_t number = 0;
    if (absl::SimpleAtoi(text->value, &number) && number >= 0) return number;
    return Invalid(absl::StrCat("--group is ", launcher_.name, ", and ", text->name, " is '", text->value,
                                "', which is no number"));
  }

 private:
  const Launcher& launcher_;
  const Environment& environment_;
};

absl::StatusOr<std::string> LeaderAddress(const std::string& from, absl::string_view leader) {
  return AddressOf(from, leader, kGroupPort);
}

absl::StatusOr<std::string> FindLeader(const Launcher& launcher, const GivenPlace& given,
                                       const Variables& variables) {
  if (!given.leader.empty()) return LeaderAddress("--group_leader", given.leader);
  if (launcher.leader.empty()) {
    return Invalid(absl::StrCat("--group is ", launcher.name,
                                "; it needs --group_leader=HOST[:PORT], the host of node 0 as the others "
                                "reach it"));
  }
  const auto said = variables.Text(launcher.leader, "--group_leader");
  if (!said.ok()) return said.status();
  const absl::StatusOr<std::string> leader = launcher.slurm_lists ? FirstHost(said->value) : said->value;
  if (!leader.ok()) return leader;
  return LeaderAddress(said->name, *leader);
}

absl::StatusOr<int32_t> FindLocalCount(const Launcher& launcher, const Variables& variables) {
  if (!launcher.slurm_lists) return variables.Number(launcher.local_count, "");
  const auto list = variables.Text(launcher.local_count, "");
  if (!list.ok()) return list.status();
  const absl::StatusOr<int32_t> host = variables.Number({"SLURM_NODEID"}, "");
  if (!host.ok()) return host.status();
  return TasksOfHost(list->value, *host);
}

absl::Status FindNode(const Launcher& launcher, const GivenPlace& given, const Variables& variables,
                      NodePlace* place) {
  const bool flags = launcher.node.empty();
  if (flags && (!given.node.has_value() || !given.nodes.has_value())) {
    return Invalid(
        "--group is flags; it needs --group_nodes, and --group_node, a number from 0 that is another "
        "one on each node");
  }
  const absl::StatusOr<int32_t> node =
      given.node.has_value() ? *given.node : variables.Number(launcher.node, "--group_node");
  if (!node.ok()) return node.status();
  const absl::StatusOr<int32_t> nodes =
      given.nodes.has_value() ? *given.nodes : variables.Number(launcher.nodes, "--group_nodes");
  if (!nodes.ok()) return nodes.status();
  if (*nodes < 1) return Invalid(absl::StrCat("a group of ", *nodes, " nodes is none (--group_nodes)"));
  if (*node < 0 || *node >= *nodes) {
    return Invalid(absl::StrCat("this is node ", *node, " of ", *nodes,
                                " (--group_node and --group_nodes): nodes have the numbers from 0 to ",
                                *nodes - 1));
  }
  place->node = *node;
  place->nodes = *nodes;
  return absl::OkStatus();
}

}  // namespace

Environment ProcessEnvironment() {
  return [](const char* name) -> std::optional<std::string> {
    const char* value = getenv(name);
    if (value == nullptr || *value == '\0') return {};
    return value;
  };
}

absl::StatusOr<NodePlace> FindPlace(const std::string& launcher_name, const GivenPlace& given,
                                    const Environment& environment) {
  const auto launcher = std::find_if(Launchers().begin(), Launchers().end(),
                                     [&](const Launcher& each) { return each.name == launcher_name; });
  if (launcher == Launchers().end()) {
    return Invalid(absl::StrCat("--group is '", launcher_name,
                                "'; it must be one of: flags, lws, torchrun, slurm, ompi"));
  }
  const Variables variables(*launcher, environment);
  NodePlace place;
  if (absl::Status found = FindNode(*launcher, given, variables, &place); !found.ok()) return found;
  const absl::StatusOr<std::string> leader = FindLeader(*launcher, given, variables);
  if (!leader.ok()) return leader.status();
  place.leader = *leader;
  if (launcher->local_index.empty()) return place;
  const absl::StatusOr<int32_t> index = variables.Number(launcher->local_index, "");
  if (!index.ok()) return index.status();
  const absl::StatusOr<int32_t> count = FindLocalCount(*launcher, variables);
  if (!count.ok()) return count.status();
  if (*index >= *count) {
    return Invalid(absl::StrCat("--group is ", launcher->name, ", and ", launcher->local_index.front(),
                                " is ", *index, " of ", *count, " processes on this host"));
  }
  place.local_index = *index;
  place.local_count = *count;
  place.own_gpus = launcher->own_gpus != nullptr && environment(launcher->own_gpus).has_value();
  return place;
}

absl::StatusOr<std::string> AddressOf(const std::string& from, absl::string_view leader, int default_port) {
  const auto invalid = [&] {
    return Invalid(absl::StrCat(from, " is '", leader,
                                "'; it must be HOST or HOST:PORT of the one that leads, an IPv6 address in "
                                "brackets: node-0.example, 10.0.0.1:",
                                default_port, ", [fd00::1]"));
  };
  absl::string_view host = leader;
  int port = default_port;
  const size_t colon = leader.rfind(':');
  const bool ipv6 = absl::StartsWith(leader, "[");
  const bool bare_ipv6 = !ipv6 && std::count(leader.begin(), leader.end(), ':') > 1;
  const bool has_port = colon != absl::string_view::npos && !bare_ipv6 && !absl::EndsWith(leader, "]");
  if (has_port) {
    host = leader.substr(0, colon);
    if (!absl::SimpleAtoi(leader.substr(colon + 1), &port) || port < 1 || port > 65535) return invalid();
  }
  if (ipv6 && !absl::EndsWith(host, "]")) return invalid();
  const absl::string_view inside = ipv6 ? host.substr(1, host.size() - 2) : host;
  if (inside.empty() || inside.find_first_of("[], \t/") != absl::string_view::npos) return invalid();
  if (ipv6 || bare_ipv6) return absl::StrCat("[", inside, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<std::string> FirstHost(const std::string& list) {
  std::string host;
  absl::string_view rest = list;
  while (!rest.empty() && rest.front() != ',') {
    if (rest.front() != '[') {
      host.push_back(rest.front());
      rest.remove_prefix(1);
      continue;
    }
    const size_t end = rest.find(']');
    const absl::string_view first = rest.substr(1, rest.find_first_of(",-]", 1) - 1);
    if (end == absl::string_view::npos || first.empty() ||
        !std::all_of(first.begin(), first.end(), absl::ascii_isdigit)) {
      host.clear();
      break;
    }
    absl::StrAppend(&host, first);
    rest.remove_prefix(end + 1);
  }
  if (!host.empty()) return host;
  return Invalid(absl::StrCat("'", list,
                              "' is no list of hosts as Slurm has them (SLURM_STEP_NODELIST): give "
                              "--group_leader"));
}

absl::StatusOr<int32_t> TasksOfHost(const std::string& list, int32_t index) {
  int64_t left = index;
  for (absl::string_view part : absl::StrSplit(list, ',')) {
    const std::pair<absl::string_view, absl::string_view> split =
        absl::StrSplit(part, absl::MaxSplits("(x", 1));
    absl::string_view repeated = split.second;
    int32_t tasks = 0;
    int32_t hosts = 1;
    const bool once = split.first.size() == part.size();
    const bool valid = absl::SimpleAtoi(split.first, &tasks) && tasks > 0 &&
                       (once || (absl::ConsumeSuffix(&repeated, ")") && absl::SimpleAtoi(repeated, &hosts)));
    if (!valid || hosts < 1) break;
    if (left < hosts) return tasks;
    left -= hosts;
  }
  return Invalid(absl::StrCat("'", list, "' (SLURM_STEP_TASKS_PER_NODE) does not say how many tasks host ",
                              index, " has"));
}

}  // namespace lossd
