#include "server/startup/group_flags.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "server/rpc/transport/listen_address.h"
#include "server/startup/flag_checks.h"
#include "server/startup/flag_types.h"
#include "server/startup/group/device_list.h"
#include "server/startup/group/group_token.h"
#include "server/startup/group/launcher.h"
#include "server/startup/group/network_interface.h"

ABSL_FLAG(absl::Duration, rank_timeout, absl::Seconds(10),
          "a rank of a group that is silent for so long is lost: all are started again, with "
          "--checkpoint_dir from the newest checkpoints; at least 1s");
ABSL_FLAG(absl::Duration, group_start_timeout, absl::Minutes(1),
          "the start ends with an error if a rank of a group is not ready after so long; at least 1s");
ABSL_FLAG(
    absl::Duration, group_short_life, absl::Seconds(10),
    "a group that is lost five times in a row, each time sooner than this after it began to serve, gives up; "
    "0s: it never does");
ABSL_FLAG(std::string, group, "",
          "a group over several hosts: what says which of its nodes this is. flags (--group_nodes, "
          "--group_node, --group_leader), or the launcher whose variables do: lws, torchrun, slurm, ompi; "
          "flags win over them. Empty: one host, whatever variables there are");
ABSL_FLAG(std::optional<int32_t>, group_nodes, {},
          "how many lossd are started for the group, each with as many --devices");
ABSL_FLAG(std::optional<int32_t>, group_node, {}, "which of them this is, from 0; node 0 serves the clients");
ABSL_FLAG(std::string, group_leader, "",
          absl::StrCat("HOST or HOST:PORT of node 0, as the other nodes reach it; the port is ",
                       lossd::kGroupPort, " if none is given"));
ABSL_FLAG(lossd::GuardFile, group_token_file, {},
          "file with a secret that all nodes of the group have and nobody else, at least 16 bytes: openssl "
          "rand -hex 32 > FILE. It or the three flags after it are needed over several hosts");
ABSL_FLAG(lossd::GuardFile, group_tls_certificate, {},
          "PEM file: this node's certificate for the control of the group, which is then encrypted; each end "
          "shows one");
ABSL_FLAG(lossd::GuardFile, group_tls_key, {}, "PEM file: the private key of --group_tls_certificate");
ABSL_FLAG(lossd::GuardFile, group_tls_ca, {},
          "PEM file: the group's own authority; whoever has a certificate of it belongs to the group");
ABSL_FLAG(std::string, collective_network, "",
          "trusted: nobody else can read or change what goes over --collective_interface. Hidden states and "
          "gradients do, in plain text: needed over several hosts");
ABSL_FLAG(std::string, collective_interface, "",
          "the network interface, such as eth0, over which ranks of several hosts reach each other");

ABSL_FLAG(
    std::optional<bool>, lanes_at_ranks, {},
    "true: every rank of a group takes lanes of clients: on node 0 that of number r at the r-th port behind "
    "--listen's, or PATH.r of a socket, on others from --listen's own port on; false: all go to the leader; "
    "unset: true where the ranks are on several hosts");
ABSL_FLAG(std::string, advertise_host, "",
          "name or address of this node's host for clients that open lanes at its ranks; empty: the address "
          "of --collective_interface. On node 0 it is the one that they have called");

ABSL_FLAG(int32_t, group_rank, -1, "internal: set for the processes of --devices");
ABSL_FLAG(int32_t, group_ranks, 0, "internal: set for the processes of --devices");
ABSL_FLAG(int32_t, group_host_ranks, 0, "internal: set for the processes of --devices");
ABSL_FLAG(int32_t, group_host_rank, 0, "internal: set for the processes of --devices");
ABSL_FLAG(bool, group_first_of_host, true, "internal: set for the processes of --devices");
ABSL_FLAG(int64_t, group_epoch, 0, "internal: set for the processes of --devices");
ABSL_FLAG(std::string, group_socket, "", "internal: set for the processes of --devices");
ABSL_FLAG(std::string, group_listen, "", "internal: set for the processes of --devices");
ABSL_FLAG(int32_t, group_parent, -1, "internal: set for the processes of --devices");

namespace lossd {
namespace {

// Names of the flags of several hosts that are given.
std::vector<std::string> GivenOfHosts(bool replicas) {
  std::vector<std::string> given;
  const auto add = [&given](const char* name, bool is_given) {
    if (is_given) given.push_back(absl::StrCat("--", name));
  };
  add("group_nodes", absl::GetFlag(FLAGS_group_nodes).has_value());
  add("group_node", absl::GetFlag(FLAGS_group_node).has_value());
  add("group_leader", !absl::GetFlag(FLAGS_group_leader).empty());
  if (replicas) return given;  // which have the others, too
  add("group_token_file", !absl::GetFlag(FLAGS_group_token_file).name.empty());
  add("group_tls_certificate", !absl::GetFlag(FLAGS_group_tls_certificate).name.empty());
  add("group_tls_key", !absl::GetFlag(FLAGS_group_tls_key).name.empty());
  add("group_tls_ca", !absl::GetFlag(FLAGS_group_tls_ca).name.empty());
  add("collective_network", !absl::GetFlag(FLAGS_collective_network).empty());
  add("collective_interface", !absl::GetFlag(FLAGS_collective_interface).empty());
  add("advertise_host", !absl::GetFlag(FLAGS_advertise_host).empty());
  return given;
}

absl::Status ReadDurations(GroupOptions& group) {
  group.rank_timeout = absl::GetFlag(FLAGS_rank_timeout);
  group.start_timeout = absl::GetFlag(FLAGS_group_start_timeout);
  group.short_life = std::max(absl::ZeroDuration(), absl::GetFlag(FLAGS_group_short_life));
  for (const auto& [flag, value] : {std::pair("rank_timeout", group.rank_timeout),
                                    std::pair("group_start_timeout", group.start_timeout)}) {
    if (absl::Status status = CheckDuration(flag, value, absl::Seconds(1)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Processes of a launcher that are on one host share its list of devices; one device, the process's own, is
// not shared out.
absl::Status TakePart(const NodePlace& place, GroupOptions& group) {
  std::vector<std::string>& devices = group.devices;
  const size_t count = static_cast<size_t>(place.local_count);
  if (count == 1 || devices.size() == 1) return absl::OkStatus();
  const size_t part = devices.size() / count;
  if (part * count != devices.size()) {
    return Invalid(
        absl::StrCat("--devices are ", devices.size(), " (", absl::StrJoin(devices, ","), "), and ", count,
                     " processes are started on this host: each needs as many of them; start one, or "
                     "name devices that can be shared out"));
  }
  group.shared_out = devices.size();
  const auto first = devices.begin() + place.local_index * static_cast<std::ptrdiff_t>(part);
  devices = std::vector<std::string>(first, first + static_cast<std::ptrdiff_t>(part));
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadPem(const char* flag, const GuardFile& file) {
  if (file.name.empty()) return std::string();
  std::ostringstream text;
  text << std::ifstream(file.name).rdbuf();  // an iterator over it would throw where the file is a directory
  if (!text.str().empty()) return std::move(text).str();
  return Invalid(absl::StrCat("--", flag, ": cannot read ", file.name,
                              "; it must be a PEM file that this user may read"));
}

}  // namespace

absl::Status ReadGroupCredentials(const char* needed_by, rpc::GroupCredentials* to) {
  rpc::GroupCredentials& credentials = *to;
  const std::string token_file = absl::GetFlag(FLAGS_group_token_file).name;
  for (const auto& [flag, file, text] :
       {std::tuple("group_tls_certificate", absl::GetFlag(FLAGS_group_tls_certificate),
                   &credentials.certificate),
        std::tuple("group_tls_key", absl::GetFlag(FLAGS_group_tls_key), &credentials.key),
        std::tuple("group_tls_ca", absl::GetFlag(FLAGS_group_tls_ca), &credentials.ca)}) {
    absl::StatusOr<std::string> read = ReadPem(flag, file);
    if (!read.ok()) return read.status();
    *text = *std::move(read);
  }
  if (!token_file.empty()) {
    absl::StatusOr<std::string> token = ReadGroupToken(token_file);
    if (!token.ok()) return token.status();
    credentials.token = *std::move(token);
  }
  if (token_file.empty() && credentials.certificate.empty()) {
    return Invalid(absl::StrCat(
        needed_by,
        " is given; it needs --group_token_file, a secret that all nodes have, or --group_tls_certificate, "
        "--group_tls_key and --group_tls_ca: else whoever reaches the port could join"));
  }
  absl::Status can = rpc::CheckCredentials(credentials);
  if (can.ok()) return can;
  return Invalid(
      absl::StrCat("--group_tls_certificate, --group_tls_key and --group_tls_ca: ", can.message()));
}

namespace {

absl::Status ReadNetwork(std::string* interface) {
  const std::string network = absl::GetFlag(FLAGS_collective_network);
  if (network != "trusted") {
    return Invalid(absl::StrCat("--collective_network is '", network,
                                "'; over several hosts it must be trusted: Gloo and NCCL send hidden states "
                                "and gradients between them in plain text, unauthenticated. Say so if the "
                                "network of --collective_interface is as trusted as the machines are, and "
                                "nobody else can reach it"));
  }
  *interface = absl::GetFlag(FLAGS_collective_interface);
  return AddressesOf(*interface).status();
}

}  // namespace

absl::Status ReadNetworkOfReplicas(bool one_host, std::string* interface) {
  if (one_host && absl::GetFlag(FLAGS_collective_interface).empty()) return absl::OkStatus();
  return ReadNetwork(interface);
}

namespace {

// A parent has found both good before it started this rank: what has become of them since is no mistake of
// the command line.
absl::Status ReadAsRank(absl::Status read) {
  if (read.ok() || absl::GetFlag(FLAGS_group_rank) < 0) return read;
  return absl::UnavailableError(read.message());
}

// `devices` as in ReadGroupFlags.
absl::Status ReadHosts(const std::string& launcher, const std::string& devices, GroupOptions& group) {
  if (group.devices.empty()) {
    return Invalid(absl::StrCat("--group is ", launcher,
                                "; it needs --devices, those of this node: cpu, cuda:0,cuda:1, or all"));
  }
  const absl::StatusOr<NodePlace> place = FindPlace(launcher,
                                                    {.node = absl::GetFlag(FLAGS_group_node),
                                                     .nodes = absl::GetFlag(FLAGS_group_nodes),
                                                     .leader = absl::GetFlag(FLAGS_group_leader)},
                                                    ProcessEnvironment());
  if (!place.ok()) return place.status();
  const bool each_sees_its_own = devices == "all" && place->own_gpus;
  if (absl::Status taken = each_sees_its_own ? absl::OkStatus() : TakePart(*place, group); !taken.ok()) {
    return taken;
  }
  group.node = place->node;
  group.nodes = place->nodes;
  group.leader = place->leader;
  if (absl::Status fits = CheckRanks(group.nodes, group.devices.size()); !fits.ok()) return fits;
  group.host_ranks = std::min(place->local_count, group.nodes) * group.local_ranks();
  group.host_rank = place->local_index * group.local_ranks();
  group.first_of_host = place->local_index == 0;
  if (!group.SpansNodes()) return absl::OkStatus();
  if (absl::Status network = ReadNetwork(&group.interface); !network.ok()) return ReadAsRank(network);
  if (absl::GetFlag(FLAGS_group_rank) >= 0) {
    group.host_rank = absl::GetFlag(FLAGS_group_host_rank);
    group.first_of_host = absl::GetFlag(FLAGS_group_first_of_host);
  } else if (place->local_count == 1 && absl::GetFlag(FLAGS_advertise_host).empty() &&
             IsOfThisHost(group.leader)) {
    group.host_rank = group.first_rank();  // nodes that were started one by one on the leader's host
  }
  absl::Status known = ReadAsRank(ReadGroupCredentials("--group", &group.credentials));
  if (absl::GetFlag(FLAGS_group_rank) >= 0) group.credentials.token.clear();  // its parent tells it
  return known;
}

// The internal flags: all of them, or none.
absl::Status ReadRankProcess(GroupOptions& group) {
  const RankProcess process{.rank = absl::GetFlag(FLAGS_group_rank),
                            .epoch = absl::GetFlag(FLAGS_group_epoch),
                            .socket = absl::GetFlag(FLAGS_group_socket),
                            .parent = absl::GetFlag(FLAGS_group_parent)};
  const int32_t ranks = absl::GetFlag(FLAGS_group_ranks);
  if (process.rank < 0 && ranks == 0 && process.epoch == 0 && process.socket.empty() && process.parent < 0) {
    return absl::OkStatus();
  }
  const int32_t local = process.rank - group.first_rank();
  if (process.rank < 0 || local < 0 || local >= group.local_ranks() || ranks != group.ranks() ||
      process.epoch < 1 || process.socket.empty() == !group.SpansNodes() || process.parent < 0) {
    return Invalid(
        absl::StrCat("--group_rank is ", process.rank,
                     "; it and others like it are internal: --devices starts the ranks of a group"));
  }
  group.process = process;
  if (const int32_t given = absl::GetFlag(FLAGS_group_host_ranks); given > 0) group.host_ranks = given;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> AdvertisedHost(const std::string& interface) {
  std::string host = absl::GetFlag(FLAGS_advertise_host);
  if (host.empty() && interface.empty()) return std::string("127.0.0.1");
  if (host.empty()) {
    const absl::StatusOr<std::vector<std::string>> addresses = AddressesOf(interface);
    if (!addresses.ok()) return addresses.status();
    host = addresses->front();
  }
  const bool bare = absl::StrContains(host, ':') && !absl::StartsWith(host, "[");
  return bare ? absl::StrCat("[", host, "]") : host;
}

absl::StatusOr<LanePlace> ReadLaneFlags(const GroupOptions& group, const std::string& listen,
                                        const std::vector<std::string>& others) {
  const bool follows = group.process.has_value() && group.process->rank > 0;
  if (!follows || !absl::GetFlag(FLAGS_lanes_at_ranks).value_or(group.SpansHosts())) return LanePlace();
  std::string host;
  if (!group.IsBesideLeader()) {
    absl::StatusOr<std::string> advertised = AdvertisedHost(group.interface);
    if (!advertised.ok()) return advertised.status();
    host = *std::move(advertised);
  }
  std::set<int> taken;
  for (const std::string& address : others) {
    if (!address.empty()) taken.insert(rpc::SplitHostPort(address).port);
  }
  if (group.SpansNodes() && group.IsBesideLeader()) taken.insert(rpc::SplitHostPort(group.leader).port);
  // Where the leader once took a free port, those behind it may be anybody's.
  const std::string first = absl::GetFlag(FLAGS_group_listen);
  return FindLanePlace(group, first.empty() ? listen : first, host, taken);
}

absl::StatusOr<GroupOptions> ReadGroupFlags(const std::string& devices, bool replicas) {
  GroupOptions group;
  if (absl::Status status = ReadDurations(group); !status.ok()) return status;
  if (!devices.empty()) {
    absl::StatusOr<std::vector<std::string>> parsed = ParseDevices(devices);
    if (!parsed.ok()) return parsed.status();
    group.devices = *std::move(parsed);
  }
  const std::string launcher = absl::GetFlag(FLAGS_group);
  if (const std::vector<std::string> given = GivenOfHosts(replicas); launcher.empty() && !given.empty()) {
    return Invalid(absl::StrCat(absl::StrJoin(given, ", "), given.size() == 1 ? " is" : " are",
                                " given, without --group, which says that there are several hosts: "
                                "--group=flags, or the launcher's name; or --replica_set"));
  }
  if (!launcher.empty()) {
    if (absl::Status status = ReadHosts(launcher, devices, group); !status.ok()) return status;
  }
  if (absl::Status status = ReadRankProcess(group); !status.ok()) return status;
  if (group.host_ranks == 0) group.host_ranks = group.local_ranks();
  if (group.ranks() == 1 || group.process.has_value()) return group;
  if (absl::Status can = CheckInterfaces(); !can.ok()) return can;
  return group;
}

}  // namespace lossd
