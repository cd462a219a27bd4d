// Addresses that a server listens on, and the files that Unix sockets are.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_LISTEN_ADDRESS_H_
#define LOSSD_SERVER_RPC_TRANSPORT_LISTEN_ADDRESS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lossd::rpc {

// "host:port,unix:PATH,..." one by one. INVALID_ARGUMENT for an address that cannot be one: no port, a path
// longer than the system takes, nothing at all.
absl::StatusOr<std::vector<std::string>> ParseListen(const std::string& listen);

bool IsUnixSocket(const std::string& address);
// PATH of "unix:PATH"; of other addresses "".
std::string SocketFile(const std::string& address);

struct HostPort {
  std::string host;  // without the brackets of IPv6
  int port = 0;
};
// Port -1: there is none.
HostPort SplitHostPort(const std::string& address);

// Not to be reached from other machines.
bool IsLoopback(const std::string& address);
// Whether gRPC itself takes it for local, which it does with fewer: tokens need such an address, or TLS.
bool IsPlainLoopback(const std::string& address);

// Before listening on "unix:PATH": removes the socket file of a server that is no more. ALREADY_EXISTS if a
// server answers there, or if PATH is something else than a socket. Nothing to do for other addresses.
absl::Status RemoveStaleSocket(const std::string& address);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_LISTEN_ADDRESS_H_
