#include "server/rpc/connections/acceptor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/telemetry/common/logging.h"

namespace lossd::rpc {
namespace {

using ExternalConnections = grpc::ServerBuilder::experimental_type::ExternalConnectionType;

// How long connections wait when there is no descriptor at all: there is no event for a free one.
constexpr int kPauseMs = 50;

// Room for HTTP/2's first frames and a call or two, or for the first message of TLS.
constexpr int kMostUnaskedBytes = 16 << 10;

// Connections of one host that wait because of a flood from there; further ones are closed at once.
constexpr int kMostWaiting = 16;

// The lowest descriptor that is kept back. The system gives out the lowest free number, so a number from here
// on means that the others are in use.
int64_t FirstKeptBack(Acceptor::For whom) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return INT64_MAX;
  const int64_t limit = files.rlim_cur == RLIM_INFINITY ? INT64_MAX : static_cast<int64_t>(files.rlim_cur);
  const int64_t kept_back = std::clamp<int64_t>(limit / 16, 8, 64);
  return limit - (whom == Acceptor::For::kClients ? kept_back : kept_back / 2);
}

// Whether accept failed for lack of descriptors or memory, and not because of the connection.
bool IsShortage(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

// Whether a connection that has waited may be a client's: one that is still there, and has sent no more than
// clients do before the server has said a word.
bool MayBeClient(int socket) {
  pollfd polled{socket, POLLRDHUP, 0};
  if (poll(&polled, 1, 0) != 0) return false;
  int waiting_bytes = 0;
  return ioctl(socket, FIONREAD, &waiting_bytes) == 0 && waiting_bytes <= kMostUnaskedBytes;
}

void CountIn(engine::Counter* counter) {
  if (counter != nullptr) ++*counter;
}

}  // namespace

absl::Status Acceptor::Listen(const std::string& address,
                              const std::shared_ptr<grpc::ServerCredentials>& credentials,
                              grpc::ServerBuilder& builder) {
  absl::StatusOr<std::unique_ptr<Listener>> listener =
      Listener::Open(address, for_ == For::kMembers ? Listener::Port::kOfAll : Listener::Port::kOwn);
  if (!listener.ok()) return listener.status();
  if (!stop_.valid()) stop_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_.valid()) return absl::UnavailableError("no file descriptor is left to take connections with");
  Place place{.listener = *std::move(listener), .servers = {}};
  for (size_t i = 0; i < Handovers::kMost; ++i) {
    place.servers.push_back(
        builder.experimental().AddExternalConnectionAcceptor(ExternalConnections::FROM_FD, credentials));
  }
  places_.push_back(std::move(place));
  return absl::OkStatus();
}

int Acceptor::port() const {
  for (const Place& place : places_) {
    if (place.listener->port() != 0) return place.listener->port();
  }
  return 0;
}

absl::Status Acceptor::Prepare() {
  try {
    taking_ = std::thread([this] {
      begin_.acquire();
      TakeConnections();
    });
    guarding_ = std::thread([this] { EndFloods(); });
  } catch (const std::system_error& error) {
    return absl::UnavailableError(
        absl::StrCat("no thread can be started to take connections: ", error.what()));
  }
  return absl::OkStatus();
}

void Acceptor::Stop() {
  if (taking_.joinable()) {
    const uint64_t one = 1;
    (void)!write(stop_.get(), &one, sizeof(one));
    begin_.release();
    taking_.join();
  }
  handovers_.Stop();
  {
    absl::MutexLock lock(&mutex_);
    over_ = true;
  }
  if (guarding_.joinable()) guarding_.join();
  waiting_.clear();
  for (Place& place : places_) place.listener.reset();
}

int Acceptor::CutOffAll() {
  absl::MutexLock lock(&mutex_);
  int cut = 0;
  for (const auto& [socket, cookie] : served_) {
    if (cookie == 0 || CookieOf(socket) != cookie) continue;  // gRPC has closed it
    CutOff(socket);
    ++cut;
  }
  served_.clear();
  return cut;
}

void Acceptor::TakeConnections() {
  std::vector<pollfd> polled = {{stop_.get(), POLLIN, 0}};
  std::vector<Place*> places = {nullptr};
  for (Place& place : places_) {
    for (const FileDescriptor& socket : place.listener->sockets()) {
      polled.push_back({socket.get(), POLLIN, 0});
      places.push_back(&place);
    }
  }
  for (;;) {
    if (poll(polled.data(), polled.size(), Patience()) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    bool room = true;
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents != 0) room = TakeAll(polled[i].fd, *places[i]) && room;
    }
    EndHandovers();
    ServeWaiting();
    if (!room) poll(polled.data(), 1, kPauseMs);
  }
}

int Acceptor::Patience() {
  return waiting_.empty() && !handovers_.AnyLasts() ? -1
                                                    : static_cast<int>(ConnectionGuard::kInterval.count());
}

bool Acceptor::TakeAll(int listener, Place& place) {
  // So many at once at most: other addresses have a turn.
  for (int i = 0; i < 64; ++i) {
    if (!handovers_.HasRoom()) return false;
    FileDescriptor socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EAGAIN) return true;
      if (!IsShortage(errno)) continue;  // the connection was given up before it was taken
      LogShortage("waits");
      return false;
    }
    if (socket.get() >= FirstKeptBack(for_)) {
      CountIn(counters_.refused);
      LogShortage("closed");
      continue;
    }
    Take(listener, place, std::move(socket));
  }
  return true;
}

void Acceptor::Take(int listener, Place& place, FileDescriptor socket) {
  const std::optional<TcpConnection> connection = ConnectionOf(socket.get());
  const auto now = ConnectionGuard::Clock::now();
  if (connection.has_value()) {
    const std::string& host = connection->peer.host;
    const auto waiting =
        std::count_if(waiting_.begin(), waiting_.end(), [&](const Waiting& one) { return one.host == host; });
    if (waiting >= kMostWaiting) {
      CountIn(counters_.flooding);
      return;
    }
    const auto at = [&] {
      absl::MutexLock lock(&mutex_);
      return guard_.ServeAt(host, now);
    }();
    if (at > now) {
      waiting_.push_back({at, host, listener, &place, std::move(socket)});
      return;
    }
  }
  Serve(listener, place, std::move(socket));
}

void Acceptor::Serve(int listener, Place& place, FileDescriptor socket) {
  {
    absl::MutexLock lock(&mutex_);
    served_[socket.get()] = CookieOf(socket.get());
    if (const auto connection = ConnectionOf(socket.get()); connection.has_value()) {
      guard_.Watch(socket.get(), *connection, ConnectionGuard::Clock::now());
      guarded_ = true;
    }
  }
  const int file = socket.Release();  // gRPC's
  handovers_.Begin(file, [listener, file, &place](size_t number) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters taken;
    taken.listener_fd = listener;
    taken.fd = file;
    place.servers[number]->HandleNewConnection(&taken);
  });
}

void Acceptor::EndHandovers() {
  const auto now = ConnectionGuard::Clock::now();
  for (const std::optional<TcpConnection>& connection : handovers_.EndOverdue()) {
    CountIn(counters_.flooding);
    const TcpAddress peer = connection.has_value() ? connection->peer : TcpAddress();
    LogFlood(connection.has_value() ? HostText(peer.host) : "a socket file", peer.port,
             "a connection was ended: it sent without a pause from the beginning", handover_lines_);
    if (!connection.has_value()) continue;
    absl::MutexLock lock(&mutex_);
    guard_.NoteOffence(peer.host, now);
  }
}

void Acceptor::ServeWaiting() {
  const auto now = ConnectionGuard::Clock::now();
  for (auto one = waiting_.begin(); one != waiting_.end();) {
    if (one->at > now || !handovers_.HasRoom()) {
      ++one;
      continue;
    }
    if (MayBeClient(one->socket.get())) {
      Serve(one->listener, *one->place, std::move(one->socket));
    } else {
      CountIn(counters_.flooding);
    }
    one = waiting_.erase(one);
  }
}

void Acceptor::EndFloods() {
  const absl::Duration interval = absl::FromChrono(ConnectionGuard::kInterval);
  absl::MutexLock lock(&mutex_);
  const auto is_needed = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return guarded_ || over_; };
  mutex_.Await(absl::Condition(&is_needed));
  while (!mutex_.AwaitWithTimeout(absl::Condition(&over_), interval)) {
    for (const TcpAddress& peer : guard_.Look(ConnectionGuard::Clock::now())) {
      CountIn(counters_.flooding);
      LogFlood(HostText(peer.host), peer.port,
               "a connection was ended: it opened calls faster than they can be cleared away", flood_lines_);
    }
  }
}

void Acceptor::LogShortage(const char* connection) {
  const std::optional<uint64_t> left_out = lines_.Take(std::chrono::steady_clock::now());
  if (!left_out.has_value()) return;
  telemetry::Log(telemetry::LogLevel::kWarning,
                 "a connection was not taken: too few file descriptors are left",
                 {{"connection", connection},
                  {"lines_left_out", *left_out},
                  {"remedy",
                   "raise the hard limit of open files (ulimit -Hn, LimitNOFILE), or find out who "
                   "connects so often (ss -tnp)"}});
}

void Acceptor::LogFlood(const std::string& peer, int port, const char* why, RateLimit& lines) {
  const std::optional<uint64_t> left_out = lines.Take(std::chrono::steady_clock::now());
  if (!left_out.has_value()) return;
  telemetry::Log(telemetry::LogLevel::kWarning, why,
                 {{"peer", peer},
                  {"port", port},
                  {"lines_left_out", *left_out},
                  {"remedy", "find out who connects from there; a network policy keeps strangers away"}});
}

}  // namespace lossd::rpc
