// A server-streaming call on raw bytes. Messages are taken off the wire while the caller deals with those
// before them, up to a few.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_MESSAGE_STREAM_H_
#define LOSSD_CLIENT_SRC_CONNECTION_MESSAGE_STREAM_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "client/src/connection/watch.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/client_callback.h"

namespace lossd::internal {

// Used by one thread.
class MessageStream final : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Starts the call at once, over the channel of `server`, which must outlive it. `silence` is about the time
  // before the first message. `method` is "/package.Service/Method", `request` its one message.
  MessageStream(const WatchedServer& server, Watch::Silence silence, const std::string& method,
                const grpc::ByteBuffer& request);
  // Ends the call if it still runs, and waits for that.
  ~MessageStream() override;

  // Waits for the next message. False when there is none: the call is over, or is waited for no longer.
  bool Read(grpc::ByteBuffer* message);
  // Why. Only after Read was false.
  absl::Status EndStatus();

 private:
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void ResumeReading();  // with mutex_ held

  const WatchedServer& server_;
  Watch::Silence silence_;
  absl::Status ended_;
  grpc::ClientContext context_;
  const uint64_t added_;  // metadata
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer read_buffer_;  // gRPC's while it reads

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<grpc::ByteBuffer> received_;
  bool read_paused_ = false;  // too many messages wait; Read starts the next one
  bool done_ = false;
  grpc::Status status_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_MESSAGE_STREAM_H_
