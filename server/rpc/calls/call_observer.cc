#include "server/rpc/calls/call_observer.h"

#include <grpcpp/grpcpp.h>

#include <string_view>

#include "server/rpc/calls/call_record.h"
#include "server/rpc/calls/methods.h"
#include "server/rpc/calls/open_calls.h"

namespace lossd::rpc {
namespace {

using grpc::experimental::InterceptionHookPoints;

// gRPC destroys it when it has forgotten the call: after the answer, after OnDone, once, however it ended.
class ObservedCall final : public grpc::experimental::Interceptor {
 public:
  ObservedCall(CallReports* reports, telemetry::RpcMethod* method, const grpc::ServerContextBase& context)
      : context_(context), record_(reports, method, context) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) {
      record_.NoteRequest(batch->GetRecvMessage());
    }
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) {
      record_.NoteResponse(batch->GetSendMessage());
    }
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      record_.NoteStatus(batch->GetSendStatus());
    }
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_CANCEL)) {
      record_.NoteCancelledHere();
    }
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_CLOSE) &&
        context_.IsCancelled()) {
      record_.NoteCancelled();
    }
    batch->Proceed();
  }

 private:
  const grpc::ServerContextBase& context_;
  CallRecord record_;
};

// Watches a call of gRPC's own service: it hears from it when the client was told something.
class ObservedWatch final : public grpc::experimental::Interceptor {
 public:
  explicit ObservedWatch(OpenCalls* calls) : watch_(calls) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) watch_.NoteSend();
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::POST_SEND_MESSAGE)) watch_.NoteSent();
    batch->Proceed();
  }

 private:
  OpenCalls::Watch watch_;
};

}  // namespace

grpc::experimental::Interceptor* CallObserver::CreateServerInterceptor(
    grpc::experimental::ServerRpcInfo* info) {
  const std::string_view path = info->method();
  if (path == kComputePath) return nullptr;
  if (passes_on_ == PassesOn::kYes && IsPassedOn(path)) return nullptr;
  if (path == kWatchPath) return new ObservedWatch(&reports_->open_calls());
  telemetry::RpcMethod* const method = reports_->Find(path);
  return method == nullptr ? nullptr : new ObservedCall(reports_, method, *info->server_context());
}

}  // namespace lossd::rpc
