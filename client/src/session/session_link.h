// What the lanes of a session have in common: which session of which server it is, the generation its chunks
// go to, whether the server's window holds, or may hold, something of it, and what the server's clock shows.
#ifndef LOSSD_CLIENT_SRC_SESSION_SESSION_LINK_H_
#define LOSSD_CLIENT_SRC_SESSION_SESSION_LINK_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/common/head_context.h"
#include "client/src/common/server_life.h"
#include "client/src/session/clock_offset.h"
#include "client/src/session/lane_places.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Thread-safe, but for Open and Adopt, which nothing else may run beside.
class SessionLink {
 public:
  SessionLink(std::shared_ptr<HeadContext> head, SessionOptions options);

  // Opens the session, which fixes the number of its lanes: options.lanes or, if that is 0, a number that
  // suits the head's rows, or one if the server has no room for more.
  absl::StatusOr<v1::OpenSessionResponse> Open();
  // OpenSession again, after a stream ended with `cause`. Its own errors are final: the window is lost with
  // the server it was at, or the head is gone. Asks anew what the server can do, unless the server itself
  // ended the stream over a position.
  absl::StatusOr<v1::OpenSessionResponse> Reopen(const absl::Status& cause);
  // From now on the session is to be at the server that calls go to, whose regions its chunks name.
  void WantHere() { here_ = true; }
  // Whether Reopen found the session that is known here.
  bool IsSame(const v1::OpenSessionResponse& response) const;
  // Ok if nothing of the known session can be in the present window, so that another one may take its place;
  // otherwise the final error: window lost, or the session expired with work in it. A replica that was lost
  // takes nothing along of a window that has ended: it ended with all that was accepted.
  absl::Status CheckReplaceable(const v1::OpenSessionResponse& response);
  // The response's session is the one that is known from now on. What it has in the window counts as this
  // process's: it is lost with the session.
  void Adopt(const v1::OpenSessionResponse& response);
  // Chunks of an earlier process were accepted while the session was being opened.
  void NoteTakenBefore(uint64_t generation);
  // Whether the window had something of the session when it was opened.
  bool opened_in_window() const;

  // Ok if another attempt may help after a stream ended with `cause`; otherwise the error to report.
  absl::Status CheckRecoverable(const absl::Status& cause) const;
  // After an ABORTED with a position: chunks go to the generation that the server expects.
  void FollowPosition(const v1::PositionInfo& position);
  // `ready` named this generation.
  void NoteGeneration(uint64_t generation);
  // The generation that the next chunk names.
  uint64_t generation();
  // Chunks name this one from now on: what an ABORTED is about.
  void NoteNamed(uint64_t generation);

  // A chunk that adds gradients to the window of `generation` was sent: it counts as being in it, until the
  // server rejects it or says that it was not accepted.
  void NoteContribution(uint64_t generation);
  void NoteWithdrawal(uint64_t generation);

  // Whether something of it is, or may be, in the present window.
  bool contributed();
  // The caller was told the marks: a window that ends by them ends before whatever is sent from now on.
  void NoteMarksTold() const { marks_told_ = true; }
  // Whether they were since the last contribution.
  bool marks_told() const { return marks_told_; }

  // Where a batch of so many tokens begins among those of the window of `generation`: at `place`, or behind
  // the one before. Of a deterministic session.
  int64_t PlaceBatch(uint64_t generation, std::optional<int64_t> place, int64_t tokens);

  // What messages of any lane tell of the server's clock: its time in a message that answers one which was
  // sent at `sent`, and a chunk's way there and back.
  using Time = std::chrono::system_clock::time_point;
  void NoteServerTime(int64_t server_time_us, Time sent, Time arrived);
  void NoteTiming(const v1::ChunkTiming& timing, Time sent, Time arrived);
  ClockOffset clock_offset() const;

  // The head was restored to a moment before what this session knows to be done.
  bool restored() const;  // while the session was open, and its marks decide
  absl::Status LostByRestore(uint64_t generation) const;
  // A lane stands where the server says that it does.
  void NoteStands();
  // How often the head had been restored where the marks of lanes are true, and which generation it had come
  // to as far as is known here.
  uint64_t restores_of_marks() const;
  uint64_t generation_of_marks() const;
  absl::Status GaveUp(const absl::Status& cause) const;
  // A sequence of this session was taken that this process never sent.
  absl::Status TakenByAnother(int32_t lane, uint64_t sequence) const;

  HeadContext& head() const { return *head_; }
  const SessionOptions& options() const { return options_; }
  int32_t lanes() const { return lanes_; }
  const std::string& session_id() const { return session_id_; }
  const std::string& incarnation() const { return incarnation_; }
  // In which the session was opened.
  const TraceContext& trace() const { return trace_; }
  v1::SessionLimits limits() const;
  // That the server has set aside for it; 0: it holds no hidden states.
  int64_t held_hidden_bytes() const;
  bool all_lanes_home() const;
  LanePlaces& places() { return places_; }
  const LanePlaces& places() const { return places_; }

 private:
  absl::StatusOr<v1::OpenSessionResponse> Ask(int32_t lanes, WhenFull when_full);
  // Where the lanes of the response's session are, which `server` has told.
  void NotePlaces(const ServerChannel& server, const v1::OpenSessionResponse& response);
  absl::Status ExplainMissing(const absl::Status& status);
  // Ok unless a restore took away what was done since in the session that is known.
  absl::Status CheckRestored(const v1::OpenSessionResponse& response);
  uint64_t GenerationLocked();
  bool ContributedLocked();
  // Whether `response` goes on where this session was, if at another server.
  bool IsSameLifeLocked(const v1::OpenSessionResponse& response) const;

  const std::shared_ptr<HeadContext> head_;
  const SessionOptions options_;
  TraceContext trace_;  // Set by Open only.
  LanePlaces places_;
  // Set by Open and Adopt only.
  int32_t lanes_ = 1;
  std::string session_id_;   // empty: never opened
  std::string incarnation_;  // of the server that has it
  bool here_ = false;        // set by WantHere only

  mutable std::atomic<bool> marks_told_ = false;
  mutable std::mutex mutex_;
  ServerLife life_;        // that of the server, or of the replicas that it is one of
  uint64_t restores_ = 0;  // of the head, as far as is known here
  // Where marks are true.
  ServerLife life_of_marks_;
  uint64_t restores_of_marks_ = 0;
  bool restored_ = false;
  v1::SessionLimits limits_;
  int64_t held_hidden_bytes_ = 0;
  uint64_t generation_ = 0;
  uint64_t named_generation_ = 0;
  // What was known before the server named an earlier one, until a stream is ready again: only a flush that
  // was aborted, and no restore, lets the session go on.
  uint64_t set_back_from_ = 0;
  uint64_t contributed_generation_ = 0;
  int64_t contributions_ = 0;  // chunks that are or may be in the window of that generation
  bool opened_in_window_ = false;
  std::map<uint64_t, int64_t> next_places_;  // by generation: of the last window and the one before
  ClockOffset clock_offset_;                 // of the server that the session is at
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_SESSION_LINK_H_
