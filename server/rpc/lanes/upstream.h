// A rank's call to the leader for one stream of a client.
#ifndef LOSSD_SERVER_RPC_LANES_UPSTREAM_H_
#define LOSSD_SERVER_RPC_LANES_UPSTREAM_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "lossd/group/v1/relay.grpc.pb.h"

namespace lossd::rpc {

// How a rank calls its leader, beside the control stream.
struct LeaderCalls {
  std::shared_ptr<grpc::Channel> channel = {};
  std::function<void(grpc::ClientContext*)> identify =
      {};  // shows that the call is of the group; thread-safe
  int64_t epoch = 1;
  int32_t rank = 1;
};

// Reads and writes one message at a time; who starts an operation holds a lock of his own, under which none
// is started once a read has failed.
class Upstream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  class Events {
   public:
    virtual ~Events() = default;
    virtual void OnLeaderRead(bool ok) = 0;
    virtual void OnLeaderWritten(bool ok) = 0;
    // Last. Nothing of the call is touched afterwards.
    virtual void OnLeaderDone(const grpc::Status& status) = 0;
  };

  // `events` outlives the call. `metadata`: of the client's, what is to go with it.
  Upstream(Events* events, const LeaderCalls& leader,
           const std::multimap<std::string, std::string>& metadata);

  void Start() { StartCall(); }
  void Read() { StartRead(&incoming_); }
  // Takes the bytes.
  void Write(grpc::ByteBuffer* message) {
    outgoing_.Swap(message);
    StartWrite(&outgoing_);
  }
  void CloseWriting() { StartWritesDone(); }
  // After a read has failed: no operation will be started.
  void LetGo() { RemoveHold(); }
  void Cancel() { context_.TryCancel(); }

  grpc::ByteBuffer& incoming() { return incoming_; }

  void OnReadDone(bool ok) override { events_->OnLeaderRead(ok); }
  void OnWriteDone(bool ok) override { events_->OnLeaderWritten(ok); }
  void OnDone(const grpc::Status& status) override { events_->OnLeaderDone(status); }

 private:
  Events* const events_;
  grpc::ClientContext context_;
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub_;
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_LANES_UPSTREAM_H_
