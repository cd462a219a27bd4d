// Who is at the other end of a TCP connection.
#ifndef LOSSD_SERVER_RPC_PEER_ADDRESS_H_
#define LOSSD_SERVER_RPC_PEER_ADDRESS_H_

#include <compare>
#include <optional>
#include <string>

namespace lossd::rpc {

struct PeerAddress {
  std::string host;  // four bytes of IPv4, also where a socket of IPv6 took it, or sixteen
  int port = 0;

  friend auto operator<=>(const PeerAddress&, const PeerAddress&) = default;
};

// None: the socket is not connected, or is not one of TCP.
std::optional<PeerAddress> PeerOf(int socket);

// `host` from four or sixteen bytes; none if it has another size.
std::optional<std::string> PlainHost(const std::string& host);

// As people write it, without the port.
std::string HostText(const std::string& host);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_PEER_ADDRESS_H_
