// Reports calls that ended: in counts, the last errors, and log lines. Any thread.
#ifndef LOSSD_SERVER_RPC_CALLS_CALL_REPORTS_H_
#define LOSSD_SERVER_RPC_CALLS_CALL_REPORTS_H_

#include <grpcpp/support/string_ref.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/calls/open_calls.h"
#include "server/rpc/calls/rate_limit.h"
#include "server/telemetry/common/logging.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd::rpc {

using CallMetadata = std::multimap<grpc::string_ref, grpc::string_ref>;

struct EndedCall {
  // Whether its client ended it: nobody was told an error then.
  enum class By { kServer, kClient };

  int code = 0;
  std::string message = {};  // as the client got it
  By by = By::kServer;
  std::chrono::steady_clock::duration time = {};
  std::string peer = {};      // empty: unknown, as of refused calls, of which gRPC tells no address
  std::string trace_id = {};  // empty: the client sent none
  // What calls that are audited say (audit.h).
  std::string token = {};                       // the name of its token; empty: none was needed
  std::vector<telemetry::LogField> facts = {};  // what its messages say of what was done
};

// A chunk that was answered with an error inside its stream, which goes on.
struct RejectedChunk {
  std::string head;
  uint64_t session = 0;  // its number among the head's sessions
  int32_t rank = 0;
  int32_t lane = 0;
  uint64_t sequence = 0;
  std::string field;  // of the chunk, that is at fault
  int code = 0;
  std::string message;  // as the client got it
  std::string peer = {};
  std::string trace_id = {};
};

class CallReports {
 public:
  // Lines about failed calls, of each level.
  static constexpr double kBurst = 100;
  static constexpr double kPerSecond = 20;

  // Lines about rejected chunks, of each head.
  static constexpr double kChunkBurst = 5;
  static constexpr double kChunksPerSecond = 0.2;

  // What the log calls the token of a call; null: none is asked for.
  using TokenNames = std::function<std::string(const CallMetadata&)>;

  // `counters` outlives it.
  explicit CallReports(telemetry::ServiceCounters* counters, TokenNames token_names = nullptr)
      : counters_(counters), token_names_(std::move(token_names)) {}

  std::string TokenNameOf(const CallMetadata& metadata) const {
    return token_names_ == nullptr ? std::string() : token_names_(metadata);
  }

  // The method of a path as it is on the wire; null: it is none of lossd's, and the call is not reported.
  telemetry::RpcMethod* Find(std::string_view path) const;

  // Each call once, in this order.
  void Begin(telemetry::RpcMethod* method) {
    ++method->in_flight;
    open_calls_.Begin();
  }
  void End(telemetry::RpcMethod* method, const EndedCall& call);

  // Calls that have begun and not ended.
  OpenCalls& open_calls() { return open_calls_; }

  // Reports a call that no service saw, instead of Begin and End. It is counted and logged, but not kept
  // among the recent errors: strangers would push out all others.
  void Refuse(std::string_view path, const EndedCall& call);

  // Logs a warning and adds a recent error, but not for every chunk: a trainer whose chunks are all rejected
  // must fill neither.
  void Reject(const RejectedChunk& chunk);

 private:
  void LogEnd(const std::string& method, const EndedCall& call);
  // None: no line is to be written.
  std::optional<uint64_t> TakeLine(telemetry::LogLevel level);
  std::optional<uint64_t> TakeAuditLine(int code);
  std::optional<uint64_t> TakeLineOf(const std::string& head);

  telemetry::ServiceCounters* const counters_;
  const TokenNames token_names_;
  OpenCalls open_calls_;
  engine::Mutex mutex_;
  RateLimit warnings_ ABSL_GUARDED_BY(mutex_){kBurst, kPerSecond};
  RateLimit others_ ABSL_GUARDED_BY(mutex_){kBurst, kPerSecond};
  // Audited calls have limits of their own, so that other calls, or failed ones, never suppress a line about
  // something that was done.
  RateLimit audited_ ABSL_GUARDED_BY(mutex_){kBurst, kPerSecond};
  RateLimit audited_failures_ ABSL_GUARDED_BY(mutex_){kBurst, kPerSecond};
  std::map<std::string, RateLimit> rejected_chunks_ ABSL_GUARDED_BY(mutex_);  // by head
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALLS_CALL_REPORTS_H_
