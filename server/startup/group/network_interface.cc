#include "server/startup/group/network_interface.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <map>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/rpc/transport/listen_address.h"

namespace lossd {
namespace {

using Addresses = std::vector<std::string>;

std::string NumericOf(const sockaddr* address) {
  const bool ipv4 = address->sa_family == AF_INET;
  if (!ipv4 && address->sa_family != AF_INET6) return "";
  std::array<char, NI_MAXHOST> host{};
  const socklen_t size = ipv4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (getnameinfo(address, size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return host.data();
}

bool IsIpv6(const std::string& address) { return absl::StrContains(address, ':'); }
bool IsOfOneLink(const std::string& address) { return absl::StartsWith(address, "fe80:"); }
bool IsLoopback(const std::string& address) { return address == "::1" || absl::StartsWith(address, "127."); }

// An error of getifaddrs, with its remedy.
struct Forbidden {
  int error;
  const char* remedy;
};
constexpr Forbidden kForbidden[] = {
    {EAFNOSUPPORT,
     "it may open no sockets of AF_NETLINK: under systemd add AF_NETLINK to RestrictAddressFamilies= of its "
     "unit (systemctl edit)"},
    {EPERM, "a filter of system calls refuses it: allow sockets of AF_NETLINK there (systemd, seccomp)"},
    {EACCES, "a security module refuses it: allow sockets of AF_NETLINK there (SELinux, AppArmor)"},
};

absl::Status WhyNoInterfaces(int error) {
  const auto* const known = std::find_if(std::begin(kForbidden), std::end(kForbidden),
                                         [error](const Forbidden& each) { return each.error == error; });
  return absl::FailedPreconditionError(absl::StrCat(
      "several devices or replicas need this host's network interfaces, and this process cannot list them: ",
      std::generic_category().message(error), known == std::end(kForbidden) ? "" : "; ",
      known == std::end(kForbidden) ? "" : known->remedy));
}

absl::StatusOr<std::map<std::string, Addresses>> Interfaces() {
  std::map<std::string, Addresses> interfaces;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return WhyNoInterfaces(errno);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, freeifaddrs);
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    if (std::string address = NumericOf(each->ifa_addr); !address.empty()) {
      interfaces[each->ifa_name].push_back(std::move(address));
    }
  }
  for (auto& [name, addresses] : interfaces) {
    std::stable_partition(addresses.begin(), addresses.end(), [](const auto& each) { return !IsIpv6(each); });
    const auto links = std::stable_partition(addresses.begin(), addresses.end(),
                                             [](const auto& each) { return !IsOfOneLink(each); });
    if (links != addresses.begin()) addresses.erase(links, addresses.end());
  }
  return interfaces;
}

// Numeric, each once; none if the name is not known here, or not yet.
Addresses Resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &first) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(first, freeaddrinfo);
  Addresses addresses;
  for (const addrinfo* each = first; each != nullptr; each = each->ai_next) {
    if (std::string address = NumericOf(each->ai_addr); !address.empty()) {
      addresses.push_back(std::move(address));
    }
  }
  return addresses;
}

}  // namespace

absl::Status CheckInterfaces() { return Interfaces().status(); }

absl::StatusOr<std::vector<std::string>> AddressesOf(const std::string& interface) {
  absl::StatusOr<std::map<std::string, Addresses>> interfaces = Interfaces();
  if (!interfaces.ok()) return interfaces.status();
  const auto found = interfaces->find(interface);
  if (found != interfaces->end()) return std::move(found->second);
  std::vector<std::string> there;
  for (const auto& [name, addresses] : *interfaces) {
    there.push_back(absl::StrCat(name, " (", absl::StrJoin(addresses, ", "), ")"));
  }
  return absl::InvalidArgumentError(absl::StrCat("--collective_interface is '", interface,
                                                 "'; over several hosts it must be the network interface by "
                                                 "which they reach each other. Those that are up "
                                                 "here: ",
                                                 absl::StrJoin(there, "; ")));
}

absl::StatusOr<std::string> ControlAddress(const std::string& interface, const std::string& leader,
                                           const char* flag) {
  const absl::StatusOr<Addresses> own = AddressesOf(interface);
  if (!own.ok()) return own.status();
  const rpc::HostPort named = rpc::SplitHostPort(leader);
  Addresses known = Resolve(named.host);
  // A host may know its own name as an address of loopback, by which others do not reach it.
  std::erase_if(known, [&](const auto& each) { return IsLoopback(each) && each != named.host; });
  const auto same = std::find_first_of(own->begin(), own->end(), known.begin(), known.end());
  if (same == own->end() && !known.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        flag, " ", named.host, " is ", absl::StrJoin(known, ", "), ", and --collective_interface ", interface,
        " has ", absl::StrJoin(*own, ", "), ": give ", flag, "=", own->front(), " everywhere"));
  }
  const std::string& host = same == own->end() ? own->front() : *same;
  return IsIpv6(host) ? absl::StrCat("[", host, "]:", named.port) : absl::StrCat(host, ":", named.port);
}

bool IsOfThisHost(const std::string& leader) {
  const absl::StatusOr<std::map<std::string, Addresses>> interfaces = Interfaces();
  if (!interfaces.ok()) return false;
  const Addresses known = Resolve(rpc::SplitHostPort(leader).host);
  return std::any_of(known.begin(), known.end(), [&](const std::string& address) {
    const auto has_it = [&](const auto& each) {
      return std::find(each.second.begin(), each.second.end(), address) != each.second.end();
    };
    return IsLoopback(address) || std::any_of(interfaces->begin(), interfaces->end(), has_it);
  });
}

}  // namespace lossd
