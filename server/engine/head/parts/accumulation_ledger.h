// Which chunk of which session is in dW: the exactly-once record of one head.
//
// Every chunk of a lane has a sequence, by one from 1. A lane carries four marks, base <= accepted and
// applied <= started <= accepted:
//   accepted  last sequence checked and queued
//   started   last sequence handed to the device; from here on it always finishes
//   applied   last sequence that is in dW (rejected ones count as applied: they are recorded as empty)
//   base      accepted at the start of the window: above it lies what the window holds
// While the window is sealed there is a fifth, next_base: what is accepted above it belongs to the next
// window. The record is O(lanes) per session, whatever the number of chunks, but for the sequences that were
// rejected for what may change (Reject): only so many of these are taken.
//
// Not thread-safe: Head guards it with its mutex.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_ACCUMULATION_LEDGER_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_ACCUMULATION_LEDGER_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/engine/chunk/session_marks.h"

namespace lossd::engine {

class AccumulationLedger {
 public:
  struct Lane {
    uint64_t accepted = 0;
    uint64_t started = 0;
    uint64_t applied = 0;
    uint64_t base = 0;
    uint64_t next_base = 0;          // while sealed: what was accepted when that began
    uint64_t added = 0;              // last sequence started whose chunk adds to dW; the others only look
    std::vector<uint64_t> rejected;  // ascending

    bool contributed() const { return accepted > base; }
    // What was started in this window adds nothing to it.
    bool only_looked() const { return added <= base; }
  };

  enum class SessionState { kOpen, kClosed };

  struct Session {
    uint64_t number = 0;  // from 1, never used again
    std::string client_key;
    int32_t rank = 0;
    SessionState state = SessionState::kOpen;
    absl::Time last_active;  // of MonotonicNow
    std::vector<Lane> lanes;

    bool contributed() const;
    // It is closed, the window holds nothing of it, and nothing of it is still being computed.
    bool is_over() const;
  };
  using Sessions = std::map<std::string, Session, std::less<>>;

  enum class Place { kNext, kRepeat, kGap };

  // The caller chooses an unused id.
  Session& Add(const std::string& session_id, std::string client_key, int32_t rank, int32_t lanes);
  // Null if there is none. Closed sessions are found as long as they are remembered.
  Session* Find(absl::string_view session_id);
  // The open session of this client, or null.
  Session* FindByKey(absl::string_view client_key, std::string* session_id);
  // The session takes no more chunks; it is remembered while the window holds something of it.
  void Close(absl::string_view session_id);

  static Place Classify(const Lane& lane, uint64_t sequence);
  static void Accept(Lane& lane) { ++lane.accepted; }
  static void Start(Lane& lane) { ++lane.started; }
  // The sequence that was just started is in no window, though it would be taken if it came now: its repeat
  // must not pass for one that is.
  static void Reject(Lane& lane) { lane.rejected.push_back(lane.started); }
  static bool WasRejected(const Lane& lane, uint64_t sequence);
  // The first sequence that was started and not applied is applied now.
  static void Apply(Lane& lane) { ++lane.applied; }
  // Where there is no window: what is applied belongs to none.
  void ForgetApplied(absl::string_view session_id);
  // Forgets the session if it is over. For after Apply.
  void ForgetIfOver(absl::string_view session_id);
  // Forgets what was accepted and not started; returns how many sequences that were.
  static uint64_t Withdraw(Lane& lane);

  // What a flush has to name: the marks of every session that accepted a chunk in this window; of one that is
  // sealed, as they were then.
  std::vector<SessionMarks> WindowMarks() const { return WindowMarksOf(sessions_, sealed_); }
  static std::vector<SessionMarks> WindowMarksOf(const Sessions& sessions, bool sealed);
  // Whether this session, or one before it of the same client, has accepted a chunk in this window or, while
  // that is sealed, in the one behind it.
  bool InWindow(absl::string_view session_id) const;
  // Ok if `named` gives exactly the accepted mark of every lane that contributed (and of any other lane it
  // names). Otherwise FAILED_PRECONDITION naming the first difference.
  absl::Status Match(std::span<const SessionMarks> named) const { return Match(sessions_, named); }
  static absl::Status Match(const Sessions& sessions, std::span<const SessionMarks> named);
  // True when everything accepted is applied.
  bool Settled() const;
  bool WindowEmpty() const;
  // Whether what has been started of the window adds nothing to it: no chunk, or losses alone.
  bool OnlyLooked() const;
  // The window is complete, and everything in it is applied: what is accepted from now on is the next one's.
  void Seal();
  // It is not: what was accepted since is part of it.
  void Reopen();
  // A new window: bases move up, and closed sessions are forgotten unless it holds something of them.
  void BeginWindow();

  // For checkpoints: the last number that a session was given; and everything, as it was then.
  uint64_t last_number() const { return last_number_; }
  enum class WindowPhase { kOpen, kSealed };
  void Replace(std::map<std::string, Session, std::less<>> sessions, uint64_t last_number, WindowPhase phase);

  int64_t open_sessions() const;
  const std::map<std::string, Session, std::less<>>& sessions() const { return sessions_; }

 private:
  std::map<std::string, Session, std::less<>> sessions_;
  uint64_t last_number_ = 0;
  bool sealed_ = false;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_ACCUMULATION_LEDGER_H_
