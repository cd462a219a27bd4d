// Ends connections that open calls faster than these can be cleared away.
//
// gRPC 1.51 takes every call that a client opens, also one that is reset at once (CVE-2023-44487) and those
// beyond the limit of calls at a time while the client has not confirmed it. Such calls cost their sender 28
// bytes and the server some 4 KiB and a place in the queue of what it does next, before anybody looks for a
// token: one connection takes the server away from all others, and gigabytes. gRPC does count calls by
// connection, so a flood is found within milliseconds and its connection cut off; and whoever connects from
// the same host is kept waiting.
#ifndef LOSSD_SERVER_RPC_CONNECTIONS_CONNECTION_GUARD_H_
#define LOSSD_SERVER_RPC_CONNECTIONS_CONNECTION_GUARD_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/rpc/connections/call_counts.h"
#include "server/rpc/connections/tcp_address.h"

namespace lossd::rpc {

// Not thread-safe. Socket files are left alone: channelz does not tell their connections apart, and the
// permissions of the file decide who has one.
class ConnectionGuard {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  // Calls of one connection that gRPC knows at a time: four times what it lets a client have under way
  // (MAX_CONCURRENT_STREAMS). More are left over from resets, or of a client that ignores the limit.
  static constexpr int64_t kMostUnfinished = 1024;
  // Calls that a client gives up before they are answered: so many at once, and so many a second on average.
  static constexpr double kResetsAtOnce = 2048;
  static constexpr double kResetsPerSecond = 256;
  // How often Look should be called while there are connections.
  static constexpr std::chrono::milliseconds kInterval{20};
  // Between the connections of a host from which one was ended; it doubles with each, up to the longest.
  static constexpr std::chrono::milliseconds kShortestWait{100};
  static constexpr std::chrono::milliseconds kLongestWait{2000};
  static constexpr std::chrono::seconds kForgiven{60};

  // `counts` outlives it.
  explicit ConnectionGuard(CallCounts* counts) : counts_(counts) {}

  // `socket`, which is `connection`, is about to be gRPC's, which closes it some time.
  void Watch(int socket, const TcpConnection& connection, Time now);

  // When the next connection of this host may be served: `now`, unless one was ended. Each call takes a
  // place.
  Time ServeAt(const std::string& host, Time now);

  // A connection of this host was ended for another reason than calls.
  void NoteOffence(const std::string& host, Time now);

  // Ends connections that are over the limits, and returns their hosts. A connection that its client has
  // closed since counts against its host just the same.
  std::vector<TcpAddress> Look(Time now);

 private:
  // A file descriptor, and the cookie that shows whether it still is the same socket.
  struct Socket {
    int number = -1;
    uint64_t cookie = 0;
  };
  // A connection that gRPC has not yet been seen to count.
  struct Watched {
    Socket socket;
    Time since{};
  };
  struct Connection {
    Socket socket;  // number -1: it was closed before it was seen
    bool ended = false;
    int64_t resets = 0;  // when it was last looked at
    double room = kResetsAtOnce;
    Time at{};
  };
  struct Offender {
    int connections = 0;  // that were ended
    Time last{};          // when the last of them was
    Time next{};          // place for the next connection
  };

  // The record of the connection that made `calls`.
  Connection& Find(const ConnectionCalls& calls);
  static bool IsFlood(const ConnectionCalls& calls, Time now, Connection& connection);

  CallCounts* const counts_;
  int64_t begun_ = 0;  // calls, when it last asked for every connection
  Time looked_{};      // when that was, and the processor's time that it took
  Clock::duration look_took_{};
  std::set<int> ports_;  // of connections that were watched; gRPC counts those of other servers here, too
  // Those that gRPC has closed before they were seen stay until the number of their socket is used again.
  std::map<TcpConnection, Watched> watched_;
  std::unordered_map<int, TcpConnection> watched_sockets_;  // by number
  std::unordered_map<int64_t, Connection> connections_;     // by gRPC's number; those that it still knows
  std::unordered_map<std::string, Offender> offenders_;     // by host
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONNECTIONS_CONNECTION_GUARD_H_
