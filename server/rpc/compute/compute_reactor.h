// One live Compute stream: one lane of a session.
//
// Reads one message at a time, hands each chunk to its head, and writes answers and applied marks back, one
// at a time. It reads on only while neither the lane's byte credit (payloads, with all that they keep in
// memory, and answers under way) nor that of the session, which its lanes share, is used up, so HTTP/2 holds
// back a fast sender, and a client that does not read its answers stops being read from. A lane that has
// nothing under way always reads, so that none depends on another's answers being read. It finishes exactly
// once: when the client is done and everything is answered, on an error of position, when fenced, on drain,
// and on cancellation.
//
// Owns itself from creation until gRPC is done with it; the engine's references may outlive that.
#ifndef LOSSD_SERVER_RPC_COMPUTE_COMPUTE_REACTOR_H_
#define LOSSD_SERVER_RPC_COMPUTE_COMPUTE_REACTOR_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/compute_wire.h"
#include "server/engine/common/mutex.h"
#include "server/engine/common/worker_pool.h"
#include "server/engine/engine.h"
#include "server/engine/head/head.h"
#include "server/engine/schedule/session_credit.h"
#include "server/rpc/calls/call_record.h"
#include "server/rpc/calls/call_reports.h"
#include "server/rpc/compute/compute_requests.h"

namespace lossd::rpc {

class ComputeReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                             public engine::LaneListener,
                             public std::enable_shared_from_this<ComputeReactor> {
 public:
  using DoneCallback = std::function<std::shared_ptr<const void>(ComputeReactor*)>;

  // `on_done` is called when gRPC is done with the stream; what it returns is held until the stream no longer
  // holds itself. A shared_ptr must hold the reactor. `writers` and
  // `reports` outlive it; `reports` and `record` may be null.
  ComputeReactor(engine::Engine* engine, engine::WorkerPool* writers, CallReports* reports,
                 grpc::CallbackServerContext* context, std::unique_ptr<CallRecord> record,
                 std::unique_ptr<ComputeRequests> requests, DoneCallback on_done);
  ~ComputeReactor() override;

  // Takes ownership of itself and starts reading. Once, before the reactor is returned to gRPC.
  void Start();
  // Reads no more, answers what was accepted, then ends with UNAVAILABLE.
  void Drain();
  // Takes and answers nothing more and ends with `status`.
  void Revoke(const grpc::Status& status);
  // To be called now and then: a stream that is over, but whose client has not read the last message from one
  // call to the next, is cancelled. Until then it keeps that message.
  void CancelIfStuck();
  // Ends the call without a word.
  void Cancel();

  // gRPC's events.
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // The engine's. Answers and marks are taken here and written by other threads: to start a write of gRPC's
  // may mean to copy all of it into a socket.
  void OnAnswer(engine::ChunkAnswer answer) override;
  void OnApplied(uint64_t applied) override;
  void OnEnd(absl::Status status) override;

 private:
  // Whether answers under way are still delivered before the stream ends.
  enum class Ending { kAfterAnswers, kAtOnce };
  struct Response {
    grpc::ByteBuffer bytes;
    bool is_result = false;
    bool is_rejection = false;
    std::optional<absl::Time> ready = {};  // of a result with losses: since when it has been there
  };
  // What a chunk that was taken has under way.
  struct Cost {
    int64_t bytes = 0;         // payload and answer, wherever they are
    int64_t dx_elsewhere = 0;  // of these, dX that another rank holds and sends
  };
  // Holds the stream's lock, and then, without it, wakes other streams of the session that wait for credit.
  class ABSL_SCOPED_LOCKABLE Guard {
   public:
    explicit Guard(ComputeReactor* reactor) ABSL_EXCLUSIVE_LOCK_FUNCTION(reactor->mutex_)
        : reactor_(reactor) {
      reactor_->mutex_.Lock();
    }
    ~Guard() ABSL_UNLOCK_FUNCTION();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    ComputeReactor* const reactor_;
  };

  // What the engine told: an answer, or how far dW has come.
  using News = std::variant<engine::ChunkAnswer, uint64_t>;

  void Post(News news);
  void TakeNews();
  // The oldest; none if there is no more, and then whoever posts the next one has it taken.
  std::optional<News> NextNews() ABSL_LOCKS_EXCLUDED(news_mutex_);
  void Take(engine::ChunkAnswer answer);
  void Take(uint64_t applied);
  void ReportRejected(const engine::ChunkAnswer& answer) const;
  void HandleMalformed(const absl::Status& status);
  // `attached`: whether an earlier message has attached the stream.
  void HandleStart(bool attached);
  void HandleChunk(bool attached);
  Cost CostOf(const engine::Chunk& chunk) const;
  void SubmitHeld();
  void EndLocked(const absl::Status& status, Ending ending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts whatever can be started now: a write, a read, or the end.
  void PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool SettledLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteLocked(Response response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetAnswersLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayReadLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReturnCreditLocked(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called when the session's credit may suffice again.
  void Resume();
  void Detach();

  engine::Engine* const engine_;
  engine::WorkerPool* const writers_;
  CallReports* const reports_;  // null: nobody asks
  grpc::CallbackServerContext* const context_;
  const std::string peer_;
  std::unique_ptr<CallRecord> record_;  // until OnDone
  const std::string trace_id_;
  const DoneCallback on_done_;
  std::shared_ptr<ComputeReactor> self_;  // until OnDone

  // Touched by the reading side alone (one read at a time), set before the first chunk.
  grpc::ByteBuffer request_bytes_;
  const std::unique_ptr<ComputeRequests> requests_;
  wire::ReceivedRequest request_;
  std::shared_ptr<engine::Head> head_;
  engine::LaneAttachment attachment_;
  engine::Timing timing_ = engine::Timing::kNone;
  engine::Chunk held_;  // being submitted, perhaps waiting for the window

  engine::Mutex news_mutex_;  // held for moments; never with the other one
  std::deque<News> news_ ABSL_GUARDED_BY(news_mutex_);
  bool taking_news_ ABSL_GUARDED_BY(news_mutex_) = false;  // somebody does

  engine::Mutex mutex_;
  std::shared_ptr<engine::SessionCredit> credit_ ABSL_GUARDED_BY(mutex_);           // null until attached
  std::vector<engine::SessionCredit::Waiter> to_be_woken_ ABSL_GUARDED_BY(mutex_);  // by the guard
  bool awaiting_credit_ ABSL_GUARDED_BY(mutex_) = false;
  bool attached_ ABSL_GUARDED_BY(mutex_) = false;
  bool detached_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool submitting_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;   // gRPC is, and with its context
  bool stuck_ ABSL_GUARDED_BY(mutex_) = false;  // when it was last looked at
  std::optional<grpc::Status> ending_ ABSL_GUARDED_BY(mutex_);
  bool at_once_ ABSL_GUARDED_BY(mutex_) = false;  // ends without waiting for answers

  grpc::ByteBuffer response_bytes_ ABSL_GUARDED_BY(mutex_);  // being written
  bool response_is_result_ ABSL_GUARDED_BY(mutex_) = false;
  bool response_is_rejection_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Time> response_ready_ ABSL_GUARDED_BY(mutex_);
  std::deque<Response> answers_ ABSL_GUARDED_BY(mutex_);  // to be written
  // What chunks cost that were taken and not yet answered on the wire, in order.
  std::deque<Cost> costs_ ABSL_GUARDED_BY(mutex_);
  int64_t outstanding_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_taken_ ABSL_GUARDED_BY(mutex_) = 0;  // highest numbered sequence this stream had taken
  uint64_t applied_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t applied_written_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_COMPUTE_COMPUTE_REACTOR_H_
