#include "tests/proxy/fault_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>

namespace lossd::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPollMilliseconds = 20;  // how soon CutAll, Silence and the destructor are noticed
constexpr std::chrono::milliseconds kDelayOfAPiece(4);
constexpr std::string_view kUnixPrefix = "unix:";

// `where`: ADDRESS:PORT.
sockaddr_in AddressOf(const std::string& where) {
  const size_t colon = where.rfind(':');
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(where.c_str() + colon + 1)));
  if (inet_pton(AF_INET, where.substr(0, colon).c_str(), &address.sin_addr) != 1) std::abort();
  return address;
}

// Closes with a reset, as a peer that vanished does.
void Reset(int fd) {
  const linger now{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  close(fd);
}

// Passes on at once what comes in small pieces: each would otherwise wait 40 ms for the last one's
// acknowledgement.
void SendWithoutDelay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// -1 if nobody is there.
int Connected(int family, const void* address, socklen_t size) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, static_cast<const sockaddr*>(address), size) == 0) return fd;
  close(fd);
  return -1;
}

bool SendAll(int fd, std::span<const char> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(sent));
  }
  return true;
}

}  // namespace

const char* NameOf(FaultKind kind) {
  switch (kind) {
    case FaultKind::kCut:
      return "cut";
    case FaultKind::kStall:
      return "stall";
    case FaultKind::kDelay:
      return "delay";
    case FaultKind::kMirror:
      return "mirror";
    case FaultKind::kRepeat:
      return "repeat";
    case FaultKind::kHalfClose:
      return "half-close";
  }
  std::abort();
}

std::vector<Fault> CutAfter(int64_t bytes) {
  if (bytes < 0) return {};
  return {{.kind = FaultKind::kCut, .after_bytes = bytes}};
}

// Carries one connection's bytes until it is over.
class FaultProxy::Relay {
 public:
  Relay(FaultProxy* proxy, Connection* connection)
      : proxy_(*proxy), connection_(*connection), ends_{connection->client, connection->server} {}

  void Run() {
    std::array<char, 4096> buffer;
    for (bool open = true; open && !Interrupted();) {
      if (proxy_.silent_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(kPollMilliseconds));
        continue;
      }
      std::array<pollfd, 2> waiting{pollfd{.fd = ends_[0], .events = POLLIN, .revents = 0},
                                    pollfd{.fd = ends_[1], .events = POLLIN, .revents = 0}};
      if (poll(waiting.data(), waiting.size(), kPollMilliseconds) <= 0) continue;
      for (size_t from = 0; open && from < waiting.size(); ++from) {
        if (waiting[from].revents == 0) continue;
        const ssize_t size = recv(ends_[from], buffer.data(), buffer.size(), 0);
        open = size > 0 && Take(from, std::span(buffer).first(static_cast<size_t>(size)));
      }
    }
  }

 private:
  bool Interrupted() const { return proxy_.stopping_ || connection_.cut; }

  // What `from` has sent. False if the connection is over.
  bool Take(size_t from, std::span<const char> bytes) {
    while (next_ < connection_.plan.size()) {
      const Fault& fault = connection_.plan[next_];
      const auto before = static_cast<size_t>(
          std::clamp<int64_t>(fault.after_bytes - since_fault_, 0, static_cast<int64_t>(bytes.size())));
      if (before == bytes.size()) break;
      if (proxy_.watch_.would_hit && !proxy_.watch_.would_hit()) {
        if (fault.if_nobody == IfNobody::kWait) break;
        ++next_;
        continue;
      }
      if (!Pass(from, bytes.first(before))) return false;
      bytes = bytes.subspan(before);
      ++next_;
      since_fault_ = 0;
      ++proxy_.faults_;
      if (proxy_.watch_.happens) proxy_.watch_.happens(connection_.number, passed_, fault);
      if (!Do(fault, from, bytes)) return false;
    }
    return Pass(from, bytes);
  }

  // False if the connection is over.
  bool Do(const Fault& fault, size_t from, std::span<const char> bytes) {
    switch (fault.kind) {
      case FaultKind::kCut:
        return false;
      case FaultKind::kStall:
        return Wait(fault.time);
      case FaultKind::kDelay:
        late_until_ = Clock::now() + fault.time;
        return true;
      case FaultKind::kMirror:
        to_[from] = from;
        return true;
      case FaultKind::kRepeat:
        return SendAll(ends_[to_[from]], bytes);
      case FaultKind::kHalfClose:
        shutdown(ends_[1 - from], SHUT_WR);
        to_[from] = kNowhere;
        return Wait(fault.time);
    }
    std::abort();
  }

  bool Pass(size_t from, std::span<const char> bytes) {
    if (Clock::now() < late_until_ && !Wait(kDelayOfAPiece)) return false;
    passed_ += static_cast<int64_t>(bytes.size());
    since_fault_ += static_cast<int64_t>(bytes.size());
    return to_[from] == kNowhere || SendAll(ends_[to_[from]], bytes);
  }

  // False if it was interrupted.
  bool Wait(std::chrono::milliseconds time) const {
    const Clock::time_point end = Clock::now() + time;
    while (!Interrupted() && Clock::now() < end) {
      std::this_thread::sleep_for(
          std::min<Clock::duration>(end - Clock::now(), std::chrono::milliseconds(kPollMilliseconds)));
    }
    return !Interrupted();
  }

  static constexpr size_t kNowhere = 2;

  FaultProxy& proxy_;
  const Connection& connection_;
  const std::array<int, 2> ends_;      // client, server
  std::array<size_t, 2> to_ = {1, 0};  // where what an end sends goes
  size_t next_ = 0;                    // of the plan
  int64_t passed_ = 0;
  int64_t since_fault_ = 0;
  Clock::time_point late_until_ = Clock::time_point::min();
};

FaultProxy::FaultProxy(const std::string& backend, Plan plan, Watch watch, const std::string& listen_at)
    : plan_(std::move(plan)), watch_(std::move(watch)), backend_(backend) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = AddressOf(listen_at);
  socklen_t size = sizeof address;
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener_, 64) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::abort();
  }
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { Accept(); });
}

FaultProxy::~FaultProxy() {
  stopping_ = true;
  acceptor_.join();
  for (Connection& connection : connections_) connection.thread.join();
  close(listener_);
}

void FaultProxy::set_backend(const std::string& backend) {
  const std::lock_guard lock(mutex_);
  backend_ = backend;
}

void FaultProxy::CutAll() {
  const std::lock_guard lock(mutex_);
  for (Connection& connection : connections_) connection.cut = true;
}

int FaultProxy::ConnectToBackend() {
  const std::lock_guard lock(mutex_);
  if (!backend_.starts_with(kUnixPrefix)) {
    const sockaddr_in address = AddressOf(backend_);
    return Connected(AF_INET, &address, sizeof address);
  }
  const std::string_view path = std::string_view(backend_).substr(kUnixPrefix.size());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  return Connected(AF_UNIX, &address, sizeof address);
}

void FaultProxy::Accept() {
  for (int number = 0; !stopping_;) {
    JoinThoseThatAreOver();
    pollfd waiting{.fd = listener_, .events = POLLIN, .revents = 0};
    if (poll(&waiting, 1, kPollMilliseconds) <= 0) continue;
    const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    const int server = ConnectToBackend();
    if (server < 0) {
      Reset(client);
      continue;
    }
    SendWithoutDelay(client);
    SendWithoutDelay(server);
    std::vector<Fault> plan = plan_ ? plan_(number) : std::vector<Fault>();
    const std::lock_guard lock(mutex_);
    Connection& connection = connections_.emplace_back();
    connection.number = number++;
    connection.client = client;
    connection.server = server;
    connection.plan = std::move(plan);
    connection.thread = std::thread([this, &connection] {
      Relay(this, &connection).Run();
      Reset(connection.client);
      Reset(connection.server);
      connection.over = true;
    });
  }
}

void FaultProxy::JoinThoseThatAreOver() {
  const std::lock_guard lock(mutex_);
  connections_.remove_if([](Connection& connection) {
    if (!connection.over) return false;
    connection.thread.join();
    return true;
  });
}

}  // namespace lossd::testing
