// The two ends of a TCP connection.
#ifndef LOSSD_SERVER_RPC_CONNECTIONS_TCP_ADDRESS_H_
#define LOSSD_SERVER_RPC_CONNECTIONS_TCP_ADDRESS_H_

#include <compare>
#include <cstdint>
#include <optional>
#include <string>

namespace lossd::rpc {

struct TcpAddress {
  std::string host;  // four bytes of IPv4, also where a socket of IPv6 took it, or sixteen
  int port = 0;

  friend auto operator<=>(const TcpAddress&, const TcpAddress&) = default;
};

// The same two ends never have two connections at a time; one peer may have several, to several of our
// addresses, from one port.
struct TcpConnection {
  TcpAddress peer;
  TcpAddress local;

  friend auto operator<=>(const TcpConnection&, const TcpConnection&) = default;
};

// None: the socket is not connected, or is not one of TCP.
std::optional<TcpConnection> ConnectionOf(int socket);

// The kernel's cookie of a socket, which no other socket of this system has; 0 if `socket` is not one.
uint64_t CookieOf(int socket);

// Ends a connection at once, with what has arrived and was not read: after a mere shutdown gRPC would first
// read on, which may be a hundred thousand calls. Of a socket file: by a shutdown.
void CutOff(int socket);

// `host` from four or sixteen bytes; none if it has another size.
std::optional<std::string> PlainHost(const std::string& host);

// As people write it, without the port.
std::string HostText(const std::string& host);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONNECTIONS_TCP_ADDRESS_H_
