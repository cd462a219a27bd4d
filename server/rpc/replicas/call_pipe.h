// A call that is served by making another one: whatever comes in one goes out at the other.
#ifndef LOSSD_SERVER_RPC_REPLICAS_CALL_PIPE_H_
#define LOSSD_SERVER_RPC_REPLICAS_CALL_PIPE_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/replicas/epoch_calls.h"

namespace lossd::rpc {

// The end that is served, of a call of any kind. One message at a time is under way in each direction. It
// ends as the other call does. Owns itself until gRPC is done with both.
class CallPipe final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  struct Target {
    std::shared_ptr<grpc::Channel> channel;
    std::string method;  // "/lossd.v1.HeadService/CreateHead"
    // Adds metadata to the call that is made, before it starts. The deadline is that of the call that is
    // served.
    std::function<void(grpc::ClientContext*)> prepare;
    // Which it ends with. May be null.
    std::shared_ptr<EpochCalls> epoch;
    // Told how it has ended for the client. May be null.
    std::function<void(const grpc::Status&)> on_end;
  };

  static CallPipe* Begin(const grpc::ServerContextBase& context, Target target);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override {
    given_up_ = true;
    made_.context->TryCancel();
  }
  void OnDone() override { delete this; }  // NOLINT(cppcoreguidelines-owning-memory): gRPC is done with it

 private:
  // The call that is made. Its operations are started by reactions of the other end, so it is held until none
  // is started any more.
  class Made final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    explicit Made(CallPipe* pipe, const std::shared_ptr<grpc::Channel>& channel)
        : pipe_(pipe), stub(channel) {}
    void OnReadDone(bool ok) override { pipe_->OnMadeRead(ok); }
    void OnWriteDone(bool ok) override { pipe_->OnMadeWritten(ok); }
    void OnDone(const grpc::Status& status) override { pipe_->OnMadeDone(status); }

   private:
    CallPipe* const pipe_;

   public:
    const std::shared_ptr<grpc::ClientContext> context = std::make_shared<grpc::ClientContext>();
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub;
  };

  explicit CallPipe(Target target) : target_(std::move(target)), made_(this, target_.channel) {}
  void Start(const grpc::ServerContextBase& context);
  void OnMadeRead(bool ok);
  void OnMadeWritten(bool ok);
  void OnMadeDone(const grpc::Status& status);

  const Target target_;
  Made made_;
  grpc::ByteBuffer in_;                 // on its way to the call that is made
  grpc::ByteBuffer out_;                // on its way back
  std::atomic<bool> given_up_ = false;  // by the client

  engine::Mutex mutex_;
  bool made_over_ ABSL_GUARDED_BY(mutex_) = false;  // nothing is started there any more
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_CALL_PIPE_H_
