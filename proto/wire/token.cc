#include "proto/wire/token.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <strings.h>
#include <sys/socket.h>

#include <cstring>

namespace lossd::wire {

namespace {

bool IsLoopback(const in_addr& address) {
  return ntohl(address.s_addr) >> IN_CLASSA_NSHIFT == IN_LOOPBACKNET;
}

bool IsLoopback(const in6_addr& address) {
  in_addr mapped{};
  std::memcpy(&mapped, address.s6_addr + sizeof(address) - sizeof(mapped), sizeof(mapped));
  return IN6_IS_ADDR_LOOPBACK(&address) || (IN6_IS_ADDR_V4MAPPED(&address) && IsLoopback(mapped));
}

}  // namespace

bool IsLoopbackHost(const std::string& host) {
  if (strcasecmp(host.c_str(), "localhost") == 0) return true;
  in_addr parsed{};  // a name may begin with 127, too
  if (inet_pton(AF_INET, host.c_str(), &parsed) == 1) return IsLoopback(parsed);
  if (host.size() < 2 || host.front() != '[' || host.back() != ']') return false;
  in6_addr parsed6{};
  return inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), &parsed6) == 1 && IsLoopback(parsed6);
}

}  // namespace lossd::wire
