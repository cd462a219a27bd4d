#include "server/rpc/connection_guard.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace lossd::rpc {
namespace {

// With fewer new calls no connection can be far over a limit.
constexpr int64_t kCallsToLook = 512;
// Looking at every connection takes a quarter of the time at most, however many there are.
constexpr int kPauseToLook = 3;
constexpr size_t kMostOffenders = 4096;

// Cuts it off at once, and what has arrived and was not read goes with it: after a mere shutdown gRPC would
// first read on, which may be a hundred thousand calls.
void CutOff(int socket) {
  sockaddr nobody{};
  nobody.sa_family = AF_UNSPEC;
  (void)connect(socket, &nobody, sizeof(nobody));
}

}  // namespace

void ConnectionGuard::Watch(int socket, const PeerAddress& peer, Time now) {
  const auto [entry, is_new] = peers_.try_emplace(socket, peer);
  if (!is_new) {
    const auto before = connections_.find(entry->second);
    if (before != connections_.end() && before->second.socket == socket) connections_.erase(before);
    entry->second = peer;
  }
  connections_[peer] = {.socket = socket, .at = now};
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

std::vector<PeerAddress> ConnectionGuard::Look(Time now) {
  const int64_t begun = counts_->Begun();
  if (begun - begun_ < kCallsToLook || now - looked_ < kPauseToLook * look_took_) return {};
  begun_ = begun;
  const Time began = Clock::now();
  std::vector<PeerAddress> ended;
  for (const ConnectionCalls& calls : counts_->ByConnection()) {
    const auto found = connections_.find(calls.peer);
    if (found == connections_.end() || !IsFlood(calls, now, found->second)) continue;
    // The number may be another file's by now.
    const int socket = found->second.socket;
    if (PeerOf(socket) != calls.peer) continue;
    CutOff(socket);
    NoteOffence(calls.peer.host, now);
    ended.push_back(calls.peer);
  }
  looked_ = now;
  look_took_ = Clock::now() - began;
  return ended;
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
