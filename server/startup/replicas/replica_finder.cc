#include "server/startup/replicas/replica_finder.h"

#include <netdb.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/startup/flag_checks.h"

namespace lossd {
namespace {

// "lossd-1.lossd.default": the first label ends with the number.
struct Numbered {
  std::string before;  // "lossd-"
  int32_t number = 0;
  std::string behind;  // ".lossd.default"
};
std::optional<Numbered> ParseNumbered(const std::string& host) {
  const size_t end = std::min(host.find('.'), host.size());
  const size_t dash = host.rfind('-', end);
  if (dash == std::string::npos) return std::nullopt;
  Numbered numbered{.before = host.substr(0, dash + 1), .behind = host.substr(end)};
  const std::string digits = host.substr(dash + 1, end - dash - 1);
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  if (!absl::SimpleAtoi(digits, &numbered.number)) return std::nullopt;
  return numbered;
}

std::string FirstOf(const Numbered& numbered) { return absl::StrCat(numbered.before, 0, numbered.behind); }

absl::StatusOr<FoundReplica> FindByLws(const Environment& environment) {
  const std::optional<std::string> index = environment("LWS_GROUP_INDEX");
  const std::optional<std::string> leader = environment("LWS_LEADER_ADDRESS");
  if (!index.has_value() || !leader.has_value()) {
    return Invalid(
        "--replica is lws, and LWS_GROUP_INDEX or LWS_LEADER_ADDRESS is not set. LeaderWorkerSet (0.6 or "
        "later) sets them in the containers of its pods; or give --replica=NUMBER and --replica_leader");
  }
  const std::optional<Numbered> numbered = ParseNumbered(*leader);
  FoundReplica found;
  if (!absl::SimpleAtoi(*index, &found.replica) || !numbered.has_value() ||
      numbered->number != found.replica) {
    return Invalid(absl::StrCat("--replica is lws, and LWS_GROUP_INDEX is '", *index,
                                "', LWS_LEADER_ADDRESS '", *leader, "': that is no leader NAME-", *index,
                                " of a group; give --replica=NUMBER and "
                                "--replica_leader"));
  }
  found.leader = FirstOf(*numbered);
  return found;
}

absl::StatusOr<FoundReplica> FindByName(const std::string& host) {
  const std::optional<Numbered> numbered = ParseNumbered(host);
  if (numbered.has_value()) return FoundReplica{numbered->number, FirstOf(*numbered)};
  return Invalid(absl::StrCat("--replica is stateful_set, and this host is '", host,
                              "', which is no NAME-NUMBER of a pod of a StatefulSet; give --replica=NUMBER "
                              "and --replica_leader"));
}

absl::StatusOr<FoundReplica> FindByNumber(const std::string& said) {
  FoundReplica found;
  if (absl::SimpleAtoi(said, &found.replica) && found.replica >= 0) return found;
  return Invalid(absl::StrCat("--replica is '", said,
                              "'; it must be this server's number among the --replicas, from 0 on, or lws or "
                              "stateful_set, which tell it"));
}

}  // namespace

absl::StatusOr<FoundReplica> FindReplica(const std::string& said, const std::string& leader,
                                         const Environment& environment, const std::string& host) {
  absl::StatusOr<FoundReplica> found = said == "lws"            ? FindByLws(environment)
                                       : said == "stateful_set" ? FindByName(host)
                                                                : FindByNumber(said);
  if (!found.ok()) return found;
  if (!leader.empty()) found->leader = leader;
  if (found->leader.empty()) {
    return Invalid(
        "--replica_set is given; it needs --replica_leader=HOST[:PORT], the host of replica 0 as the others "
        "reach it");
  }
  const absl::StatusOr<std::string> address = AddressOf("--replica_leader", found->leader, kReplicaPort);
  if (!address.ok()) return address.status();
  found->leader = *address;
  return found;
}

std::string FullHostName() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "";
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_CANONNAME;
  addrinfo* first = nullptr;
  if (getaddrinfo(name.data(), nullptr, &hints, &first) != 0) return name.data();
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(first, freeaddrinfo);
  return first->ai_canonname == nullptr ? name.data() : first->ai_canonname;
}

}  // namespace lossd
