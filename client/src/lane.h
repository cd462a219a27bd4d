// A lane of a session: the live stream to the server, and where both sides stand. Knows how to come back
// after the stream was lost, and when it must not.
#ifndef LOSSD_CLIENT_SRC_LANE_H_
#define LOSSD_CLIENT_SRC_LANE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/backoff.h"
#include "client/src/clock_offset.h"
#include "client/src/compute_stream.h"
#include "client/src/head_context.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Not thread-safe.
class Lane {
 public:
  Lane(std::shared_ptr<HeadContext> head, SessionOptions options);

  // Opens the session and its stream; afterwards the marks are true, because the server has ended every older
  // stream of the lane.
  absl::Status Open();
  // Before a batch. FAILED_PRECONDITION while the head has no weights.
  absl::Status EnsureAttached();

  enum class Recovery {
    kResumed,     // the same session: what was accepted stays accepted
    kNewSession,  // nothing of the old one matters: sequences start from the new marks
  };
  // Called when the stream has ended with `cause`. Waits, reopens and reads the marks, as long as the
  // reconnect timeout since the last progress allows. Errors are final: window lost, taken over by another
  // stream, the session expired with work in it, the server unreachable, or `cause` itself if another attempt
  // cannot help.
  absl::StatusOr<Recovery> Recover(absl::Status cause);

  // The stream works: the next failure gets the whole reconnect timeout again.
  void NoteProgress() { backoff_.Reset(); }

  // A chunk that adds gradients to the window of `generation` was sent: it counts as being in it, until the
  // server rejects it or says that it was not accepted.
  void NoteContribution(uint64_t generation);
  void NoteWithdrawal(uint64_t generation);

  // Of the server the lane's session is at.
  ClockOffset& clock_offset() { return clock_offset_; }

  void NoteAnswered(uint64_t sequence);
  void NoteApplied(uint64_t sequence);

  // Drops the stream without ceremony.
  void Abandon() { stream_.reset(); }
  // Half-closes the stream and gives the server a moment to end it.
  void Close();

  ComputeStream& stream() { return *stream_; }
  const std::string& session_id() const { return session_id_; }
  const std::string& client_key() const { return options_.client_key; }
  const SessionOptions& options() const { return options_; }
  const v1::SessionLimits& limits() const { return limits_; }
  uint64_t accepted() const { return accepted_; }
  uint64_t applied() const { return applied_; }
  int64_t reconnects() const { return reconnects_; }

  // Of the next chunk.
  uint64_t generation();
  uint64_t next_sequence() const { return next_sequence_; }
  void set_next_sequence(uint64_t sequence) { next_sequence_ = sequence; }

 private:
  absl::Status CheckRecoverable(const absl::Status& cause);
  // After ABORTED: takes over where the server stands, or explains that the lane is not ours any more.
  absl::Status FollowPosition(const absl::Status& cause);
  // OpenSession: errors are final. Sets *recovery if the session is a new one.
  absl::Status Reopen(Recovery* recovery);
  absl::Status CheckReplaceable(const v1::OpenSessionResponse& response);
  void Adopt(const v1::OpenSessionResponse& response);
  absl::Status ExplainMissing(const absl::Status& status);
  // The stream up to its `ready`.
  absl::Status Attach();
  absl::Status TakeReady(const v1::ComputeReady& ready);
  bool Contributed();

  const std::shared_ptr<HeadContext> head_;
  const SessionOptions options_;
  Backoff backoff_;
  std::unique_ptr<ComputeStream> stream_;

  std::string session_id_;  // empty: never opened
  std::string incarnation_;
  v1::SessionLimits limits_;
  uint64_t generation_ = 0;
  uint64_t accepted_ = 0;
  uint64_t answered_ = 0;  // highest sequence with a result: the server has started it and will finish
  uint64_t applied_ = 0;
  uint64_t next_sequence_ = 1;
  int64_t reconnects_ = 0;

  ClockOffset clock_offset_;

  uint64_t contributed_generation_ = 0;
  int64_t contributions_ = 0;  // chunks that are or may be in the window of that generation
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_LANE_H_
