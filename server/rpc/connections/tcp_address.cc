#include "server/rpc/connections/tcp_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>

namespace lossd::rpc {
namespace {

constexpr size_t kBytesOfIpv4 = 4;
constexpr size_t kBytesOfIpv6 = 16;

std::string BytesOf(const void* address, size_t size) { return {static_cast<const char*>(address), size}; }

// `ask`: getpeername or getsockname.
std::optional<TcpAddress> AddressBy(int (*ask)(int, sockaddr*, socklen_t*), int socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (ask(socket, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return std::nullopt;
  std::string host;
  int port = 0;
  if (storage.ss_family == AF_INET) {
    const auto* const address = reinterpret_cast<const sockaddr_in*>(&storage);
    host = BytesOf(&address->sin_addr, kBytesOfIpv4);
    port = ntohs(address->sin_port);
  } else if (storage.ss_family == AF_INET6) {
    const auto* const address = reinterpret_cast<const sockaddr_in6*>(&storage);
    host = BytesOf(&address->sin6_addr, kBytesOfIpv6);
    port = ntohs(address->sin6_port);
  }
  const std::optional<std::string> plain = PlainHost(host);
  if (!plain.has_value()) return std::nullopt;
  return TcpAddress{*plain, port};
}

}  // namespace

uint64_t CookieOf(int socket) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  if (getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &size) != 0) return 0;
  return cookie;
}

void CutOff(int socket) {
  sockaddr nobody{};
  nobody.sa_family = AF_UNSPEC;
  if (connect(socket, &nobody, sizeof(nobody)) != 0) (void)shutdown(socket, SHUT_RDWR);
}

std::optional<TcpConnection> ConnectionOf(int socket) {
  const std::optional<TcpAddress> peer = AddressBy(getpeername, socket);
  const std::optional<TcpAddress> local = AddressBy(getsockname, socket);
  if (!peer.has_value() || !local.has_value()) return std::nullopt;
  return TcpConnection{*peer, *local};
}

std::optional<std::string> PlainHost(const std::string& host) {
  if (host.size() == kBytesOfIpv4) return host;
  if (host.size() != kBytesOfIpv6) return std::nullopt;
  static constexpr std::array<char, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, '\xff', '\xff'};
  if (host.compare(0, kMapped.size(), kMapped.data(), kMapped.size()) != 0) return host;
  return host.substr(kMapped.size());
}

std::string HostText(const std::string& host) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const int family = host.size() == kBytesOfIpv4 ? AF_INET : AF_INET6;
  if (inet_ntop(family, host.data(), text.data(), text.size()) == nullptr) return "?";
  return text.data();
}

}  // namespace lossd::rpc
