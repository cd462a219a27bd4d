#include "server/rpc/transport/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/rpc/transport/listen_address.h"

namespace lossd::rpc {
namespace {

constexpr mode_t kOwnerAndGroup = 0660;
// Connections that wait to be taken: as many as the system lets wait.
constexpr int kBacklog = 1 << 16;
// A free port of one address may be taken at another one of the same host.
constexpr int kTries = 16;
// What has been sent is acknowledged within, or the connection is gone; gRPC's own, beside its keepalive.
constexpr int kUserTimeoutMs = 20'000;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  // Offset of the port, equal in IPv4 and IPv6.
  int port() const { return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port); }
  void set_port(int port) {
    reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(static_cast<uint16_t>(port));
  }
};

bool Set(int socket, int level, int option, int value) {
  return setsockopt(socket, level, option, &value, sizeof(value)) == 0;
}

// A socket that is bound, and listens unless it is to hold its port; not valid: errno says why. `file`: of a
// Unix socket.
FileDescriptor OpenSocket(const SocketAddress& address, bool listens, const std::string& file = {}) {
  FileDescriptor opened(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int number = opened.get();
  if (!opened.valid()) return {};
  if (file.empty() &&
      // Accepted sockets inherit these options. A second server on the same port is a mistake that should
      // show: no SO_REUSEPORT.
      (!Set(number, SOL_SOCKET, SO_REUSEADDR, 1) || !Set(number, IPPROTO_TCP, TCP_NODELAY, 1) ||
       !Set(number, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs))) {
    return {};
  }
  if (address.family() == AF_INET6 && !Set(number, IPPROTO_IPV6, IPV6_V6ONLY, 0)) return {};
  if (bind(number, address.generic(), address.size) != 0) return {};
  if (!listens) return opened;
  // Nobody can connect before it listens.
  if ((file.empty() || chmod(file.c_str(), kOwnerAndGroup) == 0) && listen(number, kBacklog) == 0) {
    return opened;
  }
  const int error = errno;
  if (!file.empty()) unlink(file.c_str());
  errno = error;
  return {};
}

int PortOf(const FileDescriptor& socket) {
  SocketAddress address;
  address.size = sizeof(address.storage);
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.size) != 0) return 0;
  return address.port();
}

absl::StatusOr<std::vector<SocketAddress>> Resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
    return absl::UnavailableError(gai_strerror(error));
  }
  std::vector<SocketAddress> addresses;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    SocketAddress& address = addresses.emplace_back();
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.size = one->ai_addrlen;
  }
  freeaddrinfo(found);
  return addresses;
}

// The machine has no such address, or no IPv6.
bool IsMissing(int error) { return error == EADDRNOTAVAIL || error == EAFNOSUPPORT; }

bool IsEveryAddress(const std::string& host) { return host.empty() || host == "0.0.0.0" || host == "::"; }

// One port on all `addresses`; of port 0 a free one.
absl::Status OpenAll(const std::vector<SocketAddress>& addresses, int port, bool listens,
                     std::vector<FileDescriptor>* sockets) {
  int missing = EADDRNOTAVAIL;
  for (SocketAddress address : addresses) {
    address.set_port(sockets->empty() ? port : PortOf(sockets->front()));
    FileDescriptor socket = OpenSocket(address, listens);
    const int error = errno;
    if (socket.valid()) {
      sockets->push_back(std::move(socket));
    } else if (IsMissing(error)) {
      missing = error;
    } else {
      sockets->clear();
      return absl::Status(absl::ErrnoToStatusCode(error), std::generic_category().message(error));
    }
  }
  if (!sockets->empty()) return absl::OkStatus();
  return absl::UnavailableError(std::generic_category().message(missing));
}

// What to do about `refused`, with which a socket could not be opened at `address`.
std::string Advice(const absl::Status& refused, const std::string& address, Listener::Port port) {
  if (IsUnixSocket(address)) return "is its folder there and writable?";
  if (refused.code() != absl::ErrnoToStatusCode(EADDRINUSE)) {
    return "is the address one of this machine, and may this user take the port?";
  }
  if (port == Listener::Port::kOfAll) {
    return "perhaps another lossd runs there: stop it, or name another port, the same to all that connect";
  }
  return absl::StrCat("perhaps another lossd runs there: stop it, or name another port (",
                      address.substr(0, address.rfind(':')), ":0 takes a free one)");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Open(const std::string& address, Port port) {
  std::unique_ptr<Listener> listener(new Listener);
  absl::Status opened;
  if (IsUnixSocket(address)) {
    if (absl::Status removed = RemoveStaleSocket(address); !removed.ok()) return removed;
    opened = listener->OpenFile(SocketFile(address));
  } else {
    opened = listener->OpenHost(SplitHostPort(address), Use::kListen);
  }
  if (opened.ok()) return listener;
  return engine::MakeError(absl::StatusCode::kUnavailable, engine::RejectReason::kInternal, "listen",
                           absl::StrCat("cannot listen on ", address, ": ", opened.message(), "; ",
                                        Advice(opened, address, port)));
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Hold(const std::string& address) {
  std::unique_ptr<Listener> held(new Listener);
  if (IsUnixSocket(address)) return held;
  if (absl::Status opened = held->OpenHost(SplitHostPort(address), Use::kHold); !opened.ok()) return opened;
  return held;
}

absl::Status Listener::OpenFile(const std::string& path) {
  SocketAddress address;
  auto* const local = reinterpret_cast<sockaddr_un*>(&address.storage);
  local->sun_family = AF_UNIX;
  std::memcpy(local->sun_path, path.data(), path.size());  // ParseListen: it is short enough
  address.size = sizeof(*local);
  FileDescriptor socket = OpenSocket(address, true, path);
  if (!socket.valid()) return absl::UnavailableError(std::generic_category().message(errno));
  path_ = path;
  sockets_.push_back(std::move(socket));
  return absl::OkStatus();
}

absl::Status Listener::OpenHost(const HostPort& address, Use use) {
  const bool listens = use == Use::kListen;
  const auto& [host, port] = address;
  absl::Status status;
  if (IsEveryAddress(host)) {
    // A socket of IPv6 takes IPv4, too.
    for (const char* const every : {"::", "0.0.0.0"}) {
      const absl::StatusOr<std::vector<SocketAddress>> addresses = Resolve(every);
      status = addresses.ok() ? OpenAll(*addresses, port, listens, &sockets_) : addresses.status();
      if (status.ok() || !absl::IsUnavailable(status)) break;
    }
  } else {
    const absl::StatusOr<std::vector<SocketAddress>> addresses = Resolve(host);
    if (!addresses.ok()) return addresses.status();
    for (int i = 0; i < (port == 0 ? kTries : 1); ++i) {
      status = OpenAll(*addresses, port, listens, &sockets_);
      if (status.ok()) break;
    }
  }
  if (status.ok()) port_ = PortOf(sockets_.front());
  return status;
}

Listener::~Listener() {
  if (!path_.empty()) unlink(path_.c_str());
}

}  // namespace lossd::rpc
