#include "server/rpc/connections/connection_guard.h"

#include <time.h>

#include <algorithm>
#include <ranges>
#include <unordered_set>
#include <utility>

namespace lossd::rpc {
namespace {

// With fewer new calls no connection can be far over a limit.
constexpr int64_t kCallsToLook = 512;
// Looking at every connection takes a quarter of a processor at most, however many there are. Time that the
// thread does not get is not counted: there is least to be had of it in a flood.
constexpr int kPauseToLook = 3;
constexpr size_t kMostOffenders = 4096;

// The processor's time that this thread has had.
ConnectionGuard::Clock::duration TimeOfThread() {
  timespec had{};
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &had) != 0) return {};
  return std::chrono::seconds(had.tv_sec) + std::chrono::nanoseconds(had.tv_nsec);
}

}  // namespace

void ConnectionGuard::Watch(int socket, const TcpConnection& connection, Time now) {
  if (const auto before = watched_sockets_.find(socket); before != watched_sockets_.end()) {
    const auto watched = watched_.find(before->second);
    if (watched != watched_.end() && watched->second.socket.number == socket) watched_.erase(watched);
  }
  ports_.insert(connection.local.port);
  watched_sockets_[socket] = connection;
  watched_[connection] = {.socket = {.number = socket, .cookie = CookieOf(socket)}, .since = now};
}

ConnectionGuard::Time ConnectionGuard::ServeAt(const std::string& host, Time now) {
  const auto found = offenders_.find(host);
  if (found == offenders_.end()) return now;
  Offender& offender = found->second;
  if (now - offender.last > kForgiven) {
    offenders_.erase(found);
    return now;
  }
  const int doublings = std::min(offender.connections - 1, 16);
  const auto wait = std::min<std::chrono::milliseconds>(kShortestWait * (1 << doublings), kLongestWait);
  offender.next = std::max(now, offender.next) + wait;
  return offender.next;
}

std::vector<TcpAddress> ConnectionGuard::Look(Time now) {
  const int64_t begun = counts_->Begun();
  if (begun - begun_ < kCallsToLook || now - looked_ < kPauseToLook * look_took_) return {};
  begun_ = begun;
  const Clock::duration began = TimeOfThread();
  std::vector<TcpAddress> ended;
  std::unordered_set<int64_t> known;
  // The newest first: of two with the same ends, the other was closed.
  const std::vector<ConnectionCalls> all = counts_->ByConnection();
  for (const ConnectionCalls& calls : std::views::reverse(all)) {
    if (!ports_.contains(calls.connection.local.port)) continue;
    known.insert(calls.id);
    Connection& connection = Find(calls);
    if (connection.ended || !IsFlood(calls, now, connection)) continue;
    connection.ended = true;
    NoteOffence(calls.connection.peer.host, now);
    ended.push_back(calls.connection.peer);
    // The number may be another file's by now. That it becomes one between these two calls is left to chance.
    const Socket& socket = connection.socket;
    if (socket.number >= 0 && CookieOf(socket.number) == socket.cookie) CutOff(socket.number);
  }
  std::erase_if(connections_, [&known](const auto& entry) { return !known.contains(entry.first); });
  looked_ = now;
  look_took_ = TimeOfThread() - began;
  return ended;
}

ConnectionGuard::Connection& ConnectionGuard::Find(const ConnectionCalls& calls) {
  const auto [entry, is_new] = connections_.try_emplace(calls.id);
  Connection& connection = entry->second;
  if (!is_new) return connection;
  connection.at = looked_;
  const auto watched = watched_.find(calls.connection);
  if (watched == watched_.end()) return connection;
  connection.socket = watched->second.socket;
  connection.at = watched->second.since;
  watched_sockets_.erase(connection.socket.number);
  watched_.erase(watched);
  return connection;
}

bool ConnectionGuard::IsFlood(const ConnectionCalls& calls, Time now, Connection& connection) {
  const double seconds = std::chrono::duration<double>(now - std::exchange(connection.at, now)).count();
  const auto resets = static_cast<double>(calls.reset - std::exchange(connection.resets, calls.reset));
  const double room = connection.room + seconds * kResetsPerSecond - resets;
  connection.room = std::min(kResetsAtOnce, room);
  return room < 0 || calls.unfinished > kMostUnfinished;
}

void ConnectionGuard::NoteOffence(const std::string& host, Time now) {
  if (offenders_.size() >= kMostOffenders) {
    std::erase_if(offenders_, [now](const auto& entry) { return now - entry.second.last > kForgiven; });
    if (offenders_.size() >= kMostOffenders) offenders_.clear();
  }
  Offender& offender = offenders_[host];
  ++offender.connections;
  offender.last = now;
}

}  // namespace lossd::rpc
