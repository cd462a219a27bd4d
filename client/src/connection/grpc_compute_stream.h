// ComputeStream over a gRPC channel, on raw bytes so that payloads are copied once on each side.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_GRPC_COMPUTE_STREAM_H_
#define LOSSD_CLIENT_SRC_CONNECTION_GRPC_COMPUTE_STREAM_H_

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "client/src/connection/breaker.h"
#include "client/src/connection/call_metadata.h"
#include "client/src/connection/compute_stream.h"
#include "client/src/connection/traffic_counter.h"
#include "client/src/connection/watch.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/client_callback.h"

namespace lossd::internal {

class GrpcComputeStream final : public ComputeStream,
                                private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Starts the call at once. The channel is the stream's own: one connection per stream. `traffic` may be
  // null, and so may `server`, if nobody looks after the waits, and `breaker`, the channel's.
  GrpcComputeStream(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<CallMetadata> metadata,
                    std::shared_ptr<TrafficCounter> traffic,
                    std::shared_ptr<const WatchedServer> server = nullptr,
                    std::unique_ptr<Breaker> breaker = nullptr);
  ~GrpcComputeStream() override;

  bool Write(grpc::ByteBuffer message) override;
  ReadResult Read(grpc::ByteBuffer* message, std::optional<std::chrono::milliseconds> timeout) override;
  std::chrono::system_clock::time_point WriteTime() const override { return write_time_; }
  std::chrono::system_clock::time_point ReadTime() const override { return read_time_; }
  bool Ended() override;
  absl::Status EndStatus() override;
  void Cancel() override { context_.TryCancel(); }
  void Close(std::chrono::milliseconds timeout) override;

 private:
  void OnWriteDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void ResumeReading();  // with mutex_ held
  // Waits with mutex_ held until `ready`, which it must be when the call is over; a watch sees to that where
  // there is a server to look after. False if the time was over before.
  template <class Ready>
  bool Wait(std::unique_lock<std::mutex>* lock, std::optional<std::chrono::milliseconds> timeout,
            Ready ready);
  // Ends the call, with mutex_ held when it is called and when it returns.
  void End(std::unique_lock<std::mutex>* lock);

  const std::shared_ptr<TrafficCounter> traffic_;
  const std::shared_ptr<CallMetadata> metadata_;
  grpc::ClientContext context_;
  const uint64_t added_;  // metadata
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub_;
  grpc::ByteBuffer write_buffer_;  // both are touched by gRPC while an operation is under way
  grpc::ByteBuffer read_buffer_;

  // The caller's.
  std::chrono::system_clock::time_point write_time_;
  std::chrono::system_clock::time_point read_time_;
  const std::shared_ptr<const WatchedServer> server_;
  const std::unique_ptr<Breaker> breaker_;
  bool heard_ = false;  // the server has said something
  absl::Status cut_;    // why the call was ended here, or what its end means

  std::mutex mutex_;
  std::condition_variable changed_;
  struct Received {
    grpc::ByteBuffer message;
    std::chrono::system_clock::time_point time;
  };
  std::deque<Received> received_;
  bool writing_ = false;
  bool write_failed_ = false;
  bool read_paused_ = false;  // too many messages wait; Read starts the next one
  bool done_ = false;
  grpc::Status status_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_GRPC_COMPUTE_STREAM_H_
