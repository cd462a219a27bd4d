// One Compute stream of a client at a rank that is not the leader: one lane of a session.
//
// Hidden states stay here, and dX is put into answers here; all else goes to the leader, which serves the
// stream as one of its own, and comes from it. As ComputeReactor it reads on only while the lane's byte
// credit (payloads, and answers under way) is not used up, and always while nothing is under way. It finishes
// exactly once: as the leader has, or with an error of its own once what the leader took is answered.
//
// Owns itself from creation until gRPC is done with it and the leader has said which of its chunks it knows.
#ifndef LOSSD_SERVER_RPC_LANES_LANE_RELAY_H_
#define LOSSD_SERVER_RPC_LANES_LANE_RELAY_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "lossd/group/v1/relay.grpc.pb.h"
#include "proto/wire/compute_wire.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/mutex.h"
#include "server/engine/group/rank_payloads.h"
#include "server/rpc/calls/call_record.h"
#include "server/rpc/lanes/relay_wire.h"
#include "server/rpc/lanes/upstream.h"

namespace lossd::rpc {

class LaneRelay final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                        public Upstream::Events,
                        public std::enable_shared_from_this<LaneRelay> {
 public:
  // Brings a payload to where the rank's device wants it. Any thread's.
  using Stage = std::function<engine::Payload(engine::Payload)>;

  // What all relays of a rank have in common. Everything outlives them.
  struct Rank {
    Stage stage = {};
    engine::RankPayloads* payloads = nullptr;
    LeaderCalls leader = {};
    std::string leader_place = {};  // as people read it
    engine::ChunkLimits limits = {};
    int64_t lane_credit_bytes = int64_t{32} << 20;
    // What lanes that have something under way may have together, and what that is: payloads and answers.
    int64_t staging_bytes = int64_t{2} << 30;
    std::atomic<int64_t>* under_way = nullptr;
    engine::Counters* counters = nullptr;
  };
  using DoneCallback = std::function<void(LaneRelay*)>;

  // `id` is this relay's, never another's. `on_done`: nothing of it is used any more. A shared_ptr must hold
  // it.
  LaneRelay(const Rank* rank, uint64_t id, grpc::CallbackServerContext* context,
            std::unique_ptr<CallRecord> record, DoneCallback on_done);

  // Takes ownership of itself and starts reading. Once, before it is returned to gRPC.
  void Start();
  // Takes and answers nothing more and ends with `status`.
  void Revoke(const grpc::Status& status);
  // To be called every second or so: a stream that is over at the leader, and whose client takes nothing for
  // kFarewell calls, is cancelled.
  static constexpr int kFarewell = 30;
  void CancelIfStuck();
  // Ends both calls without a word, and does not ask the leader what it knows.
  void Cancel();

  // Events of the client's call.
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  // Events of the call to the leader.
  void OnLeaderRead(bool ok) override;
  void OnLeaderWritten(bool ok) override;
  void OnLeaderDone(const grpc::Status& status) override;

 private:
  // A chunk that the leader has not answered.
  struct Sent {
    uint64_t sequence = 0;  // of the chunk, in its stream
    uint64_t number = 0;    // of the payload
    int64_t cost = 0;
    std::shared_ptr<engine::RankPayload> payload;
  };
  struct Answer {
    grpc::ByteBuffer bytes;
    int64_t cost = 0;
  };

  // A message of the client, on its way to the leader. An error is the stream's end.
  absl::Status Take(grpc::ByteBuffer* bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void PassOn(const v1::ComputeRequest& request, const engine::HeldTensors& held, Sent sent)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void PassOnChunk(wire::ReceivedRequest request) ABSL_LOCKS_EXCLUDED(mutex_);
  // A message of the leader, on its way to the client.
  Answer Complete(const grpc::ByteBuffer& bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  // Starts whatever can be started now.
  void PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PumpLeaderLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PumpClientLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayReadLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndAtOnceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  grpc::Status StatusLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After the leader is done: releases what it never heard of, as soon as it has said so.
  void AddUnderWayLocked(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Settle() ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(uint64_t last_known) ABSL_LOCKS_EXCLUDED(mutex_);
  // One of the two calls is over.
  void EndHalf() ABSL_LOCKS_EXCLUDED(mutex_);

  const Rank* const rank_;
  const uint64_t id_;
  grpc::CallbackServerContext* const context_;
  const DoneCallback on_done_;
  std::unique_ptr<CallRecord> record_;  // until the client's call is done
  std::shared_ptr<LaneRelay> self_;     // until both are
  grpc::ByteBuffer request_bytes_;      // the reading side's
  std::unique_ptr<Upstream> upstream_;  // set by the first message; the leader's call
  // What follows is Settle's.
  std::unique_ptr<grpc::TemplatedGenericStub<group::v1::SettleRequest, group::v1::SettleResponse>> stub_;
  grpc::ClientContext settle_context_;
  group::v1::SettleRequest settle_request_;
  group::v1::SettleResponse settle_response_;

  engine::Mutex mutex_;
  // The client's call.
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool handling_ ABSL_GUARDED_BY(mutex_) = false;  // of a message that was read
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool client_done_ ABSL_GUARDED_BY(mutex_) = false;
  int stuck_ ABSL_GUARDED_BY(mutex_) = 0;  // calls of CancelIfStuck without a write
  // The leader's.
  enum class Leader { kNotCalled, kCalled, kReadToTheEnd, kDone };
  Leader leader_ ABSL_GUARDED_BY(mutex_) = Leader::kNotCalled;
  bool leader_reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool leader_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool leader_closed_ ABSL_GUARDED_BY(mutex_) = false;  // for writing
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;          // has answered anything
  grpc::Status leader_status_ ABSL_GUARDED_BY(mutex_);

  std::optional<grpc::Status> ending_ ABSL_GUARDED_BY(mutex_);  // an end of our own
  bool at_once_ ABSL_GUARDED_BY(mutex_) = false;                // without waiting for answers
  std::deque<Sent> sent_ ABSL_GUARDED_BY(mutex_);
  std::deque<Answer> answers_ ABSL_GUARDED_BY(mutex_);  // to be written
  Answer response_ ABSL_GUARDED_BY(mutex_);             // being written
  int64_t under_way_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_sent_ ABSL_GUARDED_BY(mutex_) = false;  // a chunk, ever
  int calls_ ABSL_GUARDED_BY(mutex_) = 1;          // that are not over
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_LANES_LANE_RELAY_H_
