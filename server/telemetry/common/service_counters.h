// What the services count beside the engine: calls, errors, refusals, certificates. server/rpc writes,
// telemetry exports. Any thread.
#ifndef LOSSD_SERVER_TELEMETRY_COMMON_SERVICE_COUNTERS_H_
#define LOSSD_SERVER_TELEMETRY_COMMON_SERVICE_COUNTERS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/mutex.h"

namespace lossd::telemetry {

// gRPC's status codes, 0 to 16.
inline constexpr int kStatusCodeCount = 17;
const char* StatusCodeName(int code);  // "OK", "CANCELLED", ...; "UNKNOWN" for others

// Calls of one method.
struct RpcMethod {
  explicit RpcMethod(std::string method) : name(std::move(method)) {}

  const std::string name;  // "HeadService/CreateHead", without the package
  engine::Gauge in_flight{0};
  std::array<engine::Counter, kStatusCodeCount> ended{};  // by code
  engine::DurationHistogram seconds;                      // of streams: their whole life
};

// Methods are fixed at the start, so that each has its series at zero.
class RpcCounters {
 public:
  explicit RpcCounters(const std::vector<std::string>& methods);

  // Null if there is no such method. The pointer stays valid.
  RpcMethod* Find(std::string_view name);
  const std::vector<std::unique_ptr<RpcMethod>>& methods() const { return methods_; }

 private:
  std::vector<std::unique_ptr<RpcMethod>> methods_;
};

// Ids of sessions, flushes and servers (UUIDs, long hexadecimal numbers) cut to their first six digits and
// "…": enough to find them in a log, not enough to speak for a session. Decimal numbers stay.
std::string WithoutIds(std::string_view text);

struct RecentError {
  absl::Time time;
  std::string method;
  int code = 0;
  std::string message;   // as the client got it, but WithoutIds
  std::string trace_id;  // 32 hex digits; empty if the client sent none
};

// The last errors that clients were told, for the status page.
class RecentErrors {
 public:
  static constexpr size_t kMost = 50;

  void Add(RecentError error);
  std::vector<RecentError> Read() const;  // newest first

 private:
  mutable engine::Mutex mutex_;
  std::deque<RecentError> errors_ ABSL_GUARDED_BY(mutex_);
};

// Who was not let in, and the certificate.
struct AccessCounters {
  engine::Counter no_token{0};       // a call without a token where one is needed
  engine::Counter unknown_token{0};  // a token that is not in the file
  engine::Counter role{0};           // a method that the token's role may not call
  engine::Counter token_reloads{0};
  engine::Counter token_reloads_failed{0};
  engine::Counter tls_reloads{0};
  engine::Counter tls_reloads_failed{0};
  // 1 while the files as they are now cannot be used, so that those from before go on.
  engine::Gauge tokens_unusable{0};
  engine::Gauge tls_unusable{0};
  engine::Gauge tls_not_after_seconds{0};  // seconds since the epoch; 0: no TLS
};

struct ServiceCounters {
  explicit ServiceCounters(const std::vector<std::string>& methods) : rpcs(methods) {}

  RpcCounters rpcs;
  RecentErrors errors;
  AccessCounters access;
  std::atomic<bool> serving = false;       // calls are taken: heads are there, and clients can connect
  engine::Counter connections_refused{0};  // closed at once: too few file descriptors were left
  engine::Counter connections_flooding{
      0};  // ended, or closed at once, for calls without end (ConnectionGuard)
};

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_COMMON_SERVICE_COUNTERS_H_
