#include "server/rpc/convert/lane_addresses.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace lossd::rpc {

std::vector<std::string> LaneAddresses(const std::vector<RankLanes>& ranks, const std::string& peer) {
  const bool by_file = absl::StartsWith(peer, "unix:");
  std::vector<std::string> addresses = {""};  // the leader
  for (const RankLanes& rank : ranks) {
    // Who has come by a socket file can reach another host by its name alone.
    if (by_file && rank.host.empty()) {
      addresses.push_back(rank.suffix);
    } else {
      addresses.push_back(rank.port == 0 ? "" : absl::StrCat(rank.host, ":", rank.port));
    }
  }
  const auto has_none = [](const std::string& address) { return address.empty(); };
  if (std::all_of(addresses.begin(), addresses.end(), has_none)) addresses.clear();
  return addresses;
}

std::vector<std::string> LaneAddressesFromElsewhere(const std::vector<RankLanes>& ranks,
                                                    const std::string& leader) {
  const std::string host = leader.substr(0, leader.rfind(':'));
  std::vector<std::string> addresses = {leader};
  for (const RankLanes& rank : ranks) {
    addresses.push_back(rank.port == 0 ? leader
                                       : absl::StrCat(rank.host.empty() ? host : rank.host, ":", rank.port));
  }
  return addresses;
}

}  // namespace lossd::rpc
