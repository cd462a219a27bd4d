// A lane of a session: its live stream to the server, on a connection of its own, and where both sides stand.
// Knows how to come back to the same session after the stream was lost.
#ifndef LOSSD_CLIENT_SRC_SESSION_LANE_H_
#define LOSSD_CLIENT_SRC_SESSION_LANE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection/backoff.h"
#include "client/src/connection/compute_stream.h"
#include "client/src/session/interruption.h"
#include "client/src/session/session_link.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Used by one thread at a time, but for CancelStream. Both pointers must outlive it.
class Lane {
 public:
  Lane(SessionLink* link, Interruption* interruption, int32_t number);

  // The session is another one now, or is known for the first time: the stream goes, the marks begin anew,
  // and until Begin they are an earlier process's.
  void Adopt(const v1::OpenSessionResponse& response);
  // This process's first sequence is the one behind the marks. From now on the server taking one that was not
  // sent here is an error.
  void Begin();

  // A new stream up to its `ready`; the marks are true afterwards, because the server has ended every older
  // stream of the lane. Where it should be elsewhere than at the session's home (LanePlaces) and cannot, it
  // is there after all. On an error, why the call ended, there is no stream.
  absl::Status Attach();
  // If its stream is not at home, it goes.
  void LeaveOtherPlace();

  enum class Recovery {
    kResumed,    // the same session, what was accepted stays accepted
    kUnsettled,  // all lanes have to look together: another session, another generation, or an interruption
  };
  // Called when the stream has ended with `cause`. Waits, reopens the session and attaches, as long as the
  // reconnect timeout since the last progress allows. Errors are final: window lost, taken over by another
  // stream, the session expired with work in it, the server unreachable, or `cause` itself if another attempt
  // cannot help.
  absl::StatusOr<Recovery> Recover(absl::Status cause);
  // The stream works: the next failure gets the whole reconnect timeout again.
  void NoteProgress() { backoff_.Reset(); }

  void NoteSent(uint64_t sequence);
  void NoteAnswered(uint64_t sequence);
  void NoteApplied(uint64_t sequence);

  void DropStream();
  // Wakes the threads that wait for the stream. From any thread.
  void CancelStream();
  // Half-closes the stream, gives the server a moment to end it, and drops it.
  void Close(std::chrono::milliseconds timeout);

  // Null before Attach.
  ComputeStream* stream() { return stream_.get(); }
  // Where the stream is, or was, or else the session's home; empty: at the target of the connection.
  std::string place() const { return place_.value_or(link_->places().home()); }
  // Why it was not where it should have been, last.
  const absl::Status& displaced() const { return displaced_; }
  SessionLink& link() { return *link_; }
  int32_t number() const { return number_; }
  uint64_t accepted() const { return accepted_; }
  uint64_t accepted_when_opened() const { return accepted_when_opened_; }
  uint64_t applied() const { return applied_; }
  int64_t reconnects() const { return reconnects_; }

  // The next chunk's sequence.
  uint64_t next_sequence() const { return next_sequence_; }
  void set_next_sequence(uint64_t sequence) { next_sequence_ = sequence; }

 private:
  absl::Status AttachAt(const std::string& place);
  absl::StatusOr<std::unique_ptr<ComputeStream>> NewStream(const std::string& place);
  absl::Status AwaitReady();
  absl::Status TakeReady(const v1::ComputeReady& ready);

  SessionLink* const link_;
  Interruption* const interruption_;
  const int32_t number_;
  Backoff backoff_;
  // Guards the pointer against CancelStream; its own thread reads it without.
  std::mutex stream_mutex_;
  std::unique_ptr<ComputeStream> stream_;
  std::optional<std::string> place_;
  absl::Status displaced_;

  uint64_t accepted_ = 0;
  uint64_t accepted_when_opened_ = 0;  // as OpenSession told
  uint64_t answered_ = 0;  // highest sequence with a result: the server has started it and will finish
  uint64_t applied_ = 0;
  uint64_t sent_ = 0;  // highest sequence that this process sent, or found taken when it began
  bool begun_ = false;
  uint64_t next_sequence_ = 1;
  int64_t reconnects_ = 0;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_LANE_H_
