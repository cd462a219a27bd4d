// The leader's end of one rank's stream.
#ifndef LOSSD_SERVER_RPC_GROUP_MEMBER_STREAM_H_
#define LOSSD_SERVER_RPC_GROUP_MEMBER_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "lossd/group/v1/group.grpc.pb.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/group/group_state.h"

namespace lossd::rpc {

// Works in threads of its own, one that reads and one that writes: the threads of gRPC's callbacks are those
// of all clients, and may wait in a call for what only this stream can bring.
class MemberStream final : public RankStream {
 public:
  using Stream = grpc::ServerReaderWriter<group::v1::LeaderMessage, group::v1::MemberMessage>;

  // The stream of the rank that says this hello. `context` is the call's, and outlives Serve.
  MemberStream(std::shared_ptr<GroupState> state, const group::v1::Hello& hello, grpc::ServerContext* context)
      : state_(std::move(state)), rank_(hello.rank()), context_(context) {}

  // Serves the stream, which is in one of gRPC's threads, until it is over; with its status.
  static grpc::Status Serve(const std::shared_ptr<GroupState>& state, const group::v1::MemberMessage& first,
                            grpc::ServerContext* context, Stream* stream);

  void Write(std::shared_ptr<const group::v1::LeaderMessage> message) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Close() override { CloseWith(grpc::Status::OK); }
  void Cancel() override { context_->TryCancel(); }
  bool IsStuck() override ABSL_LOCKS_EXCLUDED(mutex_);
  std::string Peer() const override;

 private:
  // Until the rank leaves, by itself or because what it says makes no sense.
  grpc::Status Serve(Stream* stream);
  // Nothing more is queued. The first status counts.
  void CloseWith(const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Until everything is written and nothing more is queued, or the stream breaks.
  void WriteAll(Stream* stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for it; null when there will be none.
  std::shared_ptr<const group::v1::LeaderMessage> NextToWrite() ABSL_LOCKS_EXCLUDED(mutex_);
  grpc::Status closing() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<GroupState> state_;
  const int32_t rank_;
  grpc::ServerContext* const context_;

  engine::Mutex mutex_;
  engine::CondVar changed_;
  std::deque<std::shared_ptr<const group::v1::LeaderMessage>> outgoing_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool progress_ ABSL_GUARDED_BY(mutex_) = false;  // since IsStuck
  std::optional<grpc::Status> closing_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_MEMBER_STREAM_H_
