#include "server/rpc/calls/call_reports.h"

#include <grpcpp/support/status_code_enum.h>

#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/rpc/calls/audit.h"
#include "server/rpc/calls/call_observer.h"
#include "server/rpc/calls/methods.h"

namespace lossd::rpc {
namespace {

using telemetry::LogLevel;

// Warnings are for failures that an operator should look into; other codes are what clients cause themselves.
LogLevel LevelOf(int code) {
  switch (code) {
    case grpc::StatusCode::OK:
      return LogLevel::kDebug;
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::DATA_LOSS:
      return LogLevel::kWarning;
    default:
      return LogLevel::kInfo;
  }
}

// The most heads that are remembered; names that were used once are forgotten with all others.
constexpr size_t kMostHeads = 256;

// There is a place for each of gRPC's codes; a code that is none of them is sent, and read, as UNKNOWN.
int KnownCode(int code) {
  return code >= 0 && code < telemetry::kStatusCodeCount ? code : grpc::StatusCode::UNKNOWN;
}

}  // namespace

telemetry::RpcMethod* CallReports::Find(std::string_view path) const {
  return counters_->rpcs.Find(MethodOfPath(path));
}

void CallReports::End(telemetry::RpcMethod* method, const EndedCall& call) {
  method->seconds.Observe(std::chrono::duration<double>(call.time).count());
  ++method->ended[static_cast<size_t>(KnownCode(call.code))];
  if (call.code != grpc::StatusCode::OK && call.by == EndedCall::By::kServer) {
    counters_->errors.Add({absl::Now(), method->name, call.code, call.message, call.trace_id});
  }
  LogEnd(method->name, call);
  --method->in_flight;  // last: when nothing is in flight, everything above is complete
  open_calls_.End();
}

void CallReports::Refuse(std::string_view path, const EndedCall& call) {
  telemetry::RpcMethod* const method = Find(path);
  if (method == nullptr) return;  // a name that a client made up is not repeated
  ++method->ended[static_cast<size_t>(KnownCode(call.code))];
  LogEnd(method->name, call);
}

std::optional<uint64_t> CallReports::TakeLine(LogLevel level) {
  const engine::MutexLock lock(mutex_);
  return (level == LogLevel::kWarning ? warnings_ : others_).Take(std::chrono::steady_clock::now());
}

std::optional<uint64_t> CallReports::TakeAuditLine(int code) {
  const engine::MutexLock lock(mutex_);
  return (code == grpc::StatusCode::OK ? audited_ : audited_failures_).Take(std::chrono::steady_clock::now());
}

std::optional<uint64_t> CallReports::TakeLineOf(const std::string& head) {
  const engine::MutexLock lock(mutex_);
  auto limit = rejected_chunks_.find(head);
  if (limit == rejected_chunks_.end()) {
    if (rejected_chunks_.size() >= kMostHeads) rejected_chunks_.clear();
    limit = rejected_chunks_
                .emplace(std::piecewise_construct, std::forward_as_tuple(head),
                         std::forward_as_tuple(kChunkBurst, kChunksPerSecond))
                .first;
  }
  return limit->second.Take(std::chrono::steady_clock::now());
}

void CallReports::Reject(const RejectedChunk& chunk) {
  const std::optional<uint64_t> left_out = TakeLineOf(chunk.head);
  if (!left_out.has_value()) return;
  counters_->errors.Add({absl::Now(), std::string(MethodOfPath(kComputePath)), chunk.code,
                         absl::StrCat("a chunk of head ", chunk.head, " was rejected (session ",
                                      chunk.session, ", lane ", chunk.lane, "): ", chunk.message),
                         chunk.trace_id});
  std::vector<telemetry::LogField> fields = {{"head", chunk.head},
                                             {"session", chunk.session},
                                             {"rank", chunk.rank},
                                             {"lane", chunk.lane},
                                             {"sequence", chunk.sequence},
                                             {"field", chunk.field},
                                             {"code", telemetry::StatusCodeName(chunk.code)},
                                             {"message", chunk.message}};
  if (!chunk.peer.empty()) fields.emplace_back("peer", chunk.peer);
  if (!chunk.trace_id.empty()) fields.emplace_back("trace_id", chunk.trace_id);
  if (*left_out > 0) fields.emplace_back("lines_left_out", *left_out);
  telemetry::Log(LogLevel::kWarning, "a chunk was rejected", fields);
}

void CallReports::LogEnd(const std::string& method, const EndedCall& call) {
  const bool failed = call.code != grpc::StatusCode::OK;
  const bool audited = FindAudited(method) != nullptr;
  const LogLevel level = audited && !failed ? LogLevel::kInfo : LevelOf(call.code);
  if (!telemetry::Logs(level)) return;
  const std::optional<uint64_t> left_out = audited ? TakeAuditLine(call.code) : failed ? TakeLine(level) : 0;
  if (!left_out.has_value()) return;
  std::vector<telemetry::LogField> fields = {{"method", method},
                                             {"code", telemetry::StatusCodeName(call.code)},
                                             {"seconds", std::chrono::duration<double>(call.time).count()}};
  if (failed) fields.insert(fields.begin() + 2, {"message", call.message});
  fields.insert(fields.end(), call.facts.begin(), call.facts.end());
  if (!call.token.empty()) fields.emplace_back("token", call.token);
  if (!call.peer.empty()) fields.emplace_back("peer", call.peer);
  if (!call.trace_id.empty()) fields.emplace_back("trace_id", call.trace_id);
  if (*left_out > 0) fields.emplace_back("lines_left_out", *left_out);
  telemetry::Log(level, audited ? "audit" : failed ? "a call failed" : "a call ended", fields);
}

}  // namespace lossd::rpc
