#include "server/rpc/calls/call_record.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "proto/wire/trace_context.h"

namespace lossd::rpc {
namespace {

// A client whose deadline is over cancels the call, and its deadline began earlier than the server could see:
// by as much as the request was on its way. Who cancels in the last tenth of the time, or in the last second
// of a long one, has waited in vain.
constexpr int kLastPart = 10;
constexpr std::chrono::seconds kMostOnItsWay(1);
constexpr std::chrono::milliseconds kTimerGrain(2);  // deadlines are whole milliseconds

}  // namespace

std::string TraceIdOf(const CallMetadata& metadata) {
  if (metadata.count(wire::kTraceParentKey) != 1) return {};  // two contradict each other
  const grpc::string_ref parent = metadata.find(wire::kTraceParentKey)->second;
  return std::string(wire::TraceIdOf({parent.data(), parent.size()}));
}

std::string PeerOf(const grpc::ServerContextBase& context) {
  const std::string peer = context.peer();
  if (peer != "unknown" && !absl::StartsWith(peer, "inproc")) return peer;
  const auto passed = context.client_metadata().find(kPassedPeerKey);
  if (passed == context.client_metadata().end()) return peer;
  return std::string(passed->second.data(), passed->second.size());
}

void LogEvent(const char* event, const std::string& trace_id, std::vector<telemetry::LogField> fields) {
  if (!telemetry::Logs(telemetry::LogLevel::kDebug)) return;
  if (!trace_id.empty()) fields.emplace_back("trace_id", trace_id);
  telemetry::Log(telemetry::LogLevel::kDebug, event, fields);
}

std::unique_ptr<CallRecord> CallRecord::Begin(CallReports* reports, std::string_view path,
                                              const grpc::ServerContextBase& context) {
  telemetry::RpcMethod* const method = reports == nullptr ? nullptr : reports->Find(path);
  return method == nullptr ? nullptr : std::make_unique<CallRecord>(reports, method, context);
}

CallRecord::CallRecord(CallReports* reports, telemetry::RpcMethod* method,
                       const grpc::ServerContextBase& context)
    : reports_(reports),
      method_(method),
      context_(context),
      audited_(FindAudited(method->name)),
      trace_id_(TraceIdOf(context.client_metadata())),
      token_(audited_ == nullptr ? std::string() : reports->TokenNameOf(context.client_metadata())),
      patience_(context.deadline() - std::chrono::system_clock::now()) {
  reports_->Begin(method_);
}

CallRecord::~CallRecord() {
  EndedCall call;
  {
    const engine::MutexLock lock(mutex_);
    call = HowItEndedLocked();
  }
  reports_->End(method_, call);
}

void CallRecord::NoteRequest(const void* message) {
  if (audited_ == nullptr || message == nullptr) return;
  const engine::MutexLock lock(mutex_);
  AddFacts(audited_->request(message), &facts_);
}

void CallRecord::NoteResponse(const void* message) {
  if (audited_ == nullptr || message == nullptr) return;
  const engine::MutexLock lock(mutex_);
  AddFacts(audited_->response(message), &facts_);
}

void CallRecord::NoteStatus(const grpc::Status& status) {
  const engine::MutexLock lock(mutex_);
  NotePeerLocked(status.error_code());
  status_ = status;
}

void CallRecord::NoteCancelledHere() {
  const engine::MutexLock lock(mutex_);
  if (!cancelled_.has_value()) cancelled_here_ = true;  // otherwise it is over already
}

void CallRecord::NoteCancelled() {
  const engine::MutexLock lock(mutex_);
  NotePeerLocked(grpc::StatusCode::CANCELLED);
  cancelled_ = Clock::now();
  const Clock::duration margin =
      std::max<Clock::duration>(std::min<Clock::duration>(patience_ / kLastPart, kMostOnItsWay), kTimerGrain);
  late_ = *cancelled_ - begun_ >= patience_ - margin;
}

// Asks for the peer while the call still exists, and only if a line is going to name it.
void CallRecord::NotePeerLocked(int code) {
  if (!peer_.empty()) return;
  const bool told = audited_ != nullptr || telemetry::Logs(telemetry::LogLevel::kDebug);
  if (code != grpc::StatusCode::OK || told) peer_ = PeerOf(context_);
}

// Describes the end of the call as its client sees it.
EndedCall CallRecord::HowItEndedLocked() {
  EndedCall call{.time = cancelled_.value_or(Clock::now()) - begun_,
                 .peer = std::move(peer_),
                 .trace_id = trace_id_,
                 .token = token_,
                 .facts = std::move(facts_)};
  if (status_.has_value() && !cancelled_.has_value()) {
    call.code = status_->error_code();
    call.message = status_->error_message();
  } else if (late_) {
    call.code = grpc::StatusCode::DEADLINE_EXCEEDED;
    call.message = "the client's deadline was over before the answer was there";
  } else {
    call.code = grpc::StatusCode::CANCELLED;
    call.by = cancelled_here_ ? EndedCall::By::kServer : EndedCall::By::kClient;
    call.message =
        cancelled_here_ ? "cancelled by the server" : "cancelled by the client, or its connection broke";
  }
  return call;
}

}  // namespace lossd::rpc
