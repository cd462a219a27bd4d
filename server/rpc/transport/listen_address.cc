#include "server/rpc/transport/listen_address.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "proto/wire/token.h"

namespace lossd::rpc {
namespace {

absl::Status Check(const std::string& address) {
  if (absl::StartsWith(address, "unix-abstract:")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--listen names '", address,
                     "'; abstract sockets have no permissions, so every user of "
                     "the machine could connect: use unix:PATH"));
  }
  if (IsUnixSocket(address)) {
    const std::string path = SocketFile(address);
    constexpr size_t kMost = sizeof(sockaddr_un::sun_path) - 1;
    if (!path.empty() && path.size() <= kMost) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("--listen names '", address,
                                                   "'; the path of a socket has 1 to ", kMost,
                                                   " bytes, this one has ", path.size()));
  }
  // The host itself is the resolver's to judge.
  const int port = SplitHostPort(address).port;
  if (port >= 0 && port <= 65535) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--listen names '", address, "'; it must be host:port with a port from 0 to 65535, or unix:PATH"));
}

// Whether somebody listens on this socket file.
bool Answers(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (client < 0) return true;
  const int result = connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const bool refused = result != 0 && errno == ECONNREFUSED;
  close(client);
  return !refused;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseListen(const std::string& listen) {
  std::vector<std::string> addresses = absl::StrSplit(listen, ',');
  for (const std::string& address : addresses) {
    if (absl::Status status = Check(address); !status.ok()) return status;
  }
  return addresses;
}

bool IsUnixSocket(const std::string& address) { return absl::StartsWith(address, "unix:"); }

std::string SocketFile(const std::string& address) {
  absl::string_view path = address;
  if (!absl::ConsumePrefix(&path, "unix:")) return "";
  absl::ConsumePrefix(&path, "//");
  return std::string(path);
}

HostPort SplitHostPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port)) return {address, -1};
  absl::string_view host(address.data(), colon);
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) host = host.substr(1, host.size() - 2);
  return {std::string(host), port};
}

bool IsPlainLoopback(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  return IsUnixSocket(address) || host == "localhost" || host == "127.0.0.1" || host == "[::1]";
}

bool IsLoopback(const std::string& address) {
  return IsUnixSocket(address) || wire::IsLoopbackHost(address.substr(0, address.rfind(':')));
}

absl::Status RemoveStaleSocket(const std::string& address) {
  const std::string path = SocketFile(address);
  struct stat status {};
  if (path.empty() || lstat(path.c_str(), &status) != 0) return absl::OkStatus();
  if (!S_ISSOCK(status.st_mode)) {
    return absl::AlreadyExistsError(absl::StrCat(
        "cannot listen on ", address, ": the file is there and no socket; remove it or name another path"));
  }
  if (Answers(path)) {
    return absl::AlreadyExistsError(
        absl::StrCat("cannot listen on ", address, ": a server listens there; stop it or name another path"));
  }
  if (unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return absl::ErrnoToStatus(errno,
                             absl::StrCat("cannot remove the socket ", path, " that an earlier server left"));
}

}  // namespace lossd::rpc
