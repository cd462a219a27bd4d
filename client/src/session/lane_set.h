// The lanes of a session, and what concerns them together: opening the session, and coming back when it is
// not enough that one lane does.
#ifndef LOSSD_CLIENT_SRC_SESSION_LANE_SET_H_
#define LOSSD_CLIENT_SRC_SESSION_LANE_SET_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/common/head_context.h"
#include "client/src/connection/backoff.h"
#include "client/src/session/interruption.h"
#include "client/src/session/lane.h"
#include "client/src/session/session_link.h"
#include "lossd/client.h"

namespace lossd::internal {

// Used by one thread at a time, while no other uses any of its lanes, but for Interrupt.
class LaneSet {
 public:
  LaneSet(std::shared_ptr<HeadContext> head, SessionOptions options);

  // Opens the session. If an earlier process may have had it, the stream of every lane is taken over, so that
  // the marks of all are true and stay so; otherwise there is only the first lane's until a batch needs more.
  absl::Status Open();
  // Before a batch: the first lane's stream is there and, as far as is known, works. FAILED_PRECONDITION
  // while the head has no weights.
  absl::Status EnsureReady();

  enum class Recovery {
    kResumed,     // the same session: what was accepted stays accepted
    kNewSession,  // nothing of the old one matters: every lane's sequences start from the new marks
  };
  // Called when a stream has ended with `cause`: ends those of the first `used` lanes, reopens the session
  // and attaches these lanes again, so that their marks are true all together. Waits between attempts as
  // `backoff` says. Errors are final, those of Lane::Recover.
  absl::StatusOr<Recovery> Reattach(absl::Status cause, size_t used, Backoff* backoff);

  // From now on all lanes are at the server that calls go to, whose regions a batch names: between two
  // batches. If another replica has the session, it is closed there and another one opened here.
  // FAILED_PRECONDITION if that cannot be, since it has something in the window, or the server has none here
  // either.
  absl::Status ComeHere();

  // Brings whoever waits on one of the first `used` lanes to an end, until Resume. From any thread.
  void Interrupt(size_t used);
  void Resume() { interruption_.Clear(); }
  bool is_interrupted() const { return interruption_.raised(); }

  // Drops all streams without ceremony.
  void Abandon();
  // Half-closes them and gives the server a moment to end them.
  void Close();

  size_t size() const { return lanes_.size(); }
  Lane& operator[](size_t i) { return *lanes_[i]; }
  const Lane& operator[](size_t i) const { return *lanes_[i]; }
  SessionLink& link() { return link_; }
  const SessionLink& link() const { return link_; }
  int64_t reconnects() const;

 private:
  absl::Status AttachFirst(size_t used);
  absl::Status Move();  // ComeHere, of a session that another replica has
  // The session of `response` takes the place of the one that is known, and what comes next is behind its
  // marks.
  void Adopt(const v1::OpenSessionResponse& response);
  void Begin();

  SessionLink link_;
  Interruption interruption_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  int64_t reconnects_ = 0;  // of all lanes together
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_LANE_SET_H_
