#include "server/rpc/call_observer.h"

#include <chrono>
#include <mutex>
#include <optional>
#include <utility>

#include "proto/wire/trace_context.h"
#include "server/telemetry/logging.h"

namespace lossd::rpc {
namespace {

using grpc::experimental::InterceptionHookPoints;
using Clock = std::chrono::steady_clock;

std::string_view View(grpc::string_ref text) { return {text.data(), text.size()}; }

// One call. gRPC destroys it when it has forgotten the call: after the answer, after OnDone, once, however
// the call ended. Its events may come at the same time.
class ObservedCall final : public grpc::experimental::Interceptor {
 public:
  ObservedCall(CallReports* reports, telemetry::RpcMethod* method, const grpc::ServerContextBase& context)
      : reports_(reports),
        method_(method),
        context_(context),
        trace_id_(TraceIdOf(context.client_metadata())) {
    reports_->Begin(method_);
  }

  ~ObservedCall() override {
    EndedCall call;
    {
      const std::lock_guard lock(mutex_);
      call = HowItEndedLocked();
    }
    reports_->End(method_, call);
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      grpc::Status status = batch->GetSendStatus();
      const std::lock_guard lock(mutex_);
      NotePeerLocked(status.error_code());
      sent_ = std::move(status);
    }
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_CANCEL)) {
      const std::lock_guard lock(mutex_);
      cancelled_here_ = true;
    }
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_CLOSE)) NoteClosed();
    batch->Proceed();
  }

 private:
  // The status is on its way to the client, or never will be.
  void NoteClosed() {
    const bool cancelled = context_.IsCancelled();
    const std::lock_guard lock(mutex_);
    closed_ = Clock::now();
    cancelled_ = cancelled;
    if (!cancelled) return;
    NotePeerLocked(grpc::StatusCode::CANCELLED);
    late_ = std::chrono::system_clock::now() >= context_.deadline();
  }

  // While the call is there to be asked.
  void NotePeerLocked(int code) {
    if (!peer_.empty()) return;
    if (code != grpc::StatusCode::OK || telemetry::Logs(telemetry::LogLevel::kDebug)) peer_ = context_.peer();
  }

  // As the client sees it.
  EndedCall HowItEndedLocked() {
    EndedCall call{.time = closed_.value_or(Clock::now()) - begun_,
                   .peer = std::move(peer_),
                   .trace_id = std::move(trace_id_)};
    if (sent_.has_value() && !cancelled_) {
      call.code = sent_->error_code();
      call.message = sent_->error_message();
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

  CallReports* const reports_;
  telemetry::RpcMethod* const method_;
  const grpc::ServerContextBase& context_;
  const Clock::time_point begun_ = Clock::now();

  std::mutex mutex_;
  std::string trace_id_;
  std::string peer_;
  std::optional<grpc::Status> sent_;
  std::optional<Clock::time_point> closed_;
  bool cancelled_ = false;
  bool cancelled_here_ = false;
  bool late_ = false;
};

}  // namespace

grpc::experimental::Interceptor* CallObserver::CreateServerInterceptor(
    grpc::experimental::ServerRpcInfo* info) {
  telemetry::RpcMethod* const method = reports_->Find(info->method());
  return method == nullptr ? nullptr : new ObservedCall(reports_, method, *info->server_context());
}

std::string TraceIdOf(const CallMetadata& metadata) {
  if (metadata.count(wire::kTraceParentKey) != 1) return {};  // two contradict each other
  return std::string(wire::TraceIdOf(View(metadata.find(wire::kTraceParentKey)->second)));
}

void ReportRefused(CallReports& reports, const CallMetadata& metadata, const grpc::Status& status,
                   const std::string& peer) {
  const auto path = metadata.find(":path");
  if (path == metadata.end()) return;
  reports.Refuse(View(path->second), {.code = status.error_code(),
                                      .message = status.error_message(),
                                      .peer = peer,
                                      .trace_id = TraceIdOf(metadata)});
}

}  // namespace lossd::rpc
