#include "server/rpc/replicas/call_pipe.h"

#include <utility>

namespace lossd::rpc {

CallPipe* CallPipe::Begin(const grpc::ServerContextBase& context, Target target) {
  auto* pipe = new CallPipe(std::move(target));  // deletes itself when gRPC is done with it
  pipe->Start(context);
  return pipe;
}

void CallPipe::Start(const grpc::ServerContextBase& context) {
  made_.context->set_deadline(context.deadline());
  target_.prepare(made_.context.get());
  made_.stub.PrepareBidiStreamingCall(made_.context.get(), target_.method, {}, &made_);
  made_.AddHold();
  made_.StartRead(&out_);
  made_.StartCall();
  if (target_.epoch != nullptr) target_.epoch->Add(made_.context);
  StartRead(&in_);
}

// The client has said something, or nothing more.
void CallPipe::OnReadDone(bool ok) {
  const engine::MutexLock lock(mutex_);
  if (made_over_) return;
  if (ok) {
    made_.StartWrite(&in_);
  } else {
    made_.StartWritesDone();
  }
}

void CallPipe::OnMadeWritten(bool ok) {
  const engine::MutexLock lock(mutex_);
  if (!ok || made_over_) return;
  in_.Clear();
  StartRead(&in_);
}

// Nothing more comes if not ok: how the call has ended is told next.
void CallPipe::OnMadeRead(bool ok) {
  if (ok) return StartWrite(&out_);
  const engine::MutexLock lock(mutex_);
  made_over_ = true;
  made_.RemoveHold();
}

void CallPipe::OnWriteDone(bool ok) {
  if (!ok) made_.context->TryCancel();
  out_.Clear();
  made_.StartRead(&out_);
}

void CallPipe::OnMadeDone(const grpc::Status& status) {
  const grpc::Status told = target_.epoch != nullptr && !given_up_ ? target_.epoch->Told(status) : status;
  if (target_.on_end != nullptr) target_.on_end(told);
  Finish(told);
}

}  // namespace lossd::rpc
