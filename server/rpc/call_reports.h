// What is told of calls that ended: counts, the last errors, and log lines. Any thread.
#ifndef LOSSD_SERVER_RPC_CALL_REPORTS_H_
#define LOSSD_SERVER_RPC_CALL_REPORTS_H_

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "server/rpc/rate_limit.h"
#include "server/telemetry/logging.h"
#include "server/telemetry/service_counters.h"

namespace lossd::rpc {

struct EndedCall {
  // Whether its client ended it: nobody was told an error then.
  enum class By { kServer, kClient };

  int code = 0;
  std::string message = {};  // as the client got it
  By by = By::kServer;
  std::chrono::steady_clock::duration time = {};
  std::string peer = {};      // empty: unknown, as of refused calls, of which gRPC tells no address
  std::string trace_id = {};  // empty: the client sent none
};

class CallReports {
 public:
  // Lines about failed calls, of each level.
  static constexpr double kBurst = 100;
  static constexpr double kPerSecond = 20;

  // `counters` outlives it.
  explicit CallReports(telemetry::ServiceCounters* counters) : counters_(counters) {}

  // Of a path as it is on the wire; null: it is none of lossd's methods, and nothing is told of the call.
  telemetry::RpcMethod* Find(std::string_view path) const;

  // Each call once, in this order.
  void Begin(telemetry::RpcMethod* method) { ++method->in_flight; }
  void End(telemetry::RpcMethod* method, const EndedCall& call);

  // Instead of both, of a call that no service saw. It is counted and logged, and is none of the recent
  // errors: strangers would push out all others.
  void Refuse(std::string_view path, const EndedCall& call);

 private:
  void LogEnd(const std::string& method, const EndedCall& call);
  std::optional<uint64_t> TakeLine(telemetry::LogLevel level);

  telemetry::ServiceCounters* const counters_;
  std::mutex mutex_;
  RateLimit warnings_{kBurst, kPerSecond};
  RateLimit others_{kBurst, kPerSecond};
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALL_REPORTS_H_
