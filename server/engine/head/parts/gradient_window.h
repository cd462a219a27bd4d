// The state machine of a head's gradient window: which chunks belong to it, and which call ends it.
//
// A flush and a step of the optimizer end a window in the same way. The call seals it (Begin), the device
// finishes what was accepted before, and then the window is sealed until its flush is committed or aborted,
// or consumed by the step. A call that is repeated meanwhile joins the first, and one that is repeated
// afterwards gets the same answer.
//
// Thread-compatible: guarded by Head::mutex_. Callbacks are returned, to be called without it.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_GRADIENT_WINDOW_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_GRADIENT_WINDOW_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/head/parts/optimizer_step.h"
#include "server/engine/head/parts/window.h"
#include "server/engine/head/parts/window_end.h"

namespace lossd::engine {

// Whether a head has a second gradient, so that chunks of the next window are taken while a flush holds this
// one.
enum class Gradients { kOne, kTwo };

class GradientWindow {
 public:
  explicit GradientWindow(Gradients gradients) : gradients_(gradients) {}

  uint64_t generation() const { return window_.generation; }
  WindowState state() const { return window_.state; }
  uint64_t tokens() const {
    return window_.tokens;
  }  // valid ones that were answered; all are in dW once it is sealed
  const std::vector<SessionMarks>& marks() const { return window_.marks; }
  // When the first chunk in it was taken, or it was restored; none: nothing is in it.
  std::optional<absl::Time> since() const { return since_; }
  // BeginFlush, until it is committed or aborted; none: no flush is under way.
  std::optional<absl::Time> flush_since() const;
  // The flush that holds the window; its id is empty if none does.
  std::string flush_id() const;
  bool IsSealedBy(const std::string& flush_id) const;

  // Chunks

  enum class Turn {
    kNow,   // belongs to this window
    kNext,  // belongs to the next one, which has a gradient already
    kWait,  // will belong to this or the next window once the call that ends this one is done
    kNever,
  };
  Turn TurnOf(uint64_t generation) const;
  // A chunk of this generation that was taken at `accepted` is answered: so many valid tokens.
  void Count(uint64_t generation, uint64_t valid_tokens, absl::Time accepted);
  // Whether chunks of this generation are added to the second gradient.
  bool InSecond(uint64_t generation) const { return in_second_ != IsNext(generation); }
  bool in_second() const { return in_second_; }  // this window

  // Ending it

  // FAILED_PRECONDITION unless the window is open: what is ending it.
  absl::Status CheckOpen() const;
  // FAILED_PRECONDITION for the window behind one that a flush still holds.
  absl::Status CheckNotBehindFlush(uint64_t generation) const;

  // A call that finds another call ending the window, or done with it: its answer, or none if it waits with
  // the first; then `done` was taken. `marks`: Canonical, as everywhere below.
  std::optional<absl::StatusOr<FlushInfo>> JoinFlush(const std::vector<SessionMarks>& marks, float scale,
                                                     FlushCallback& done);
  std::optional<absl::StatusOr<StepResult>> JoinStep(const std::vector<SessionMarks>& marks,
                                                     const StepRequest& request, StepCallback& done);
  // What the last step that was taken had; its generation is 0 if there was none.
  const StepRecord& last_step() const { return window_.last_step; }
  // The answer of the last step to a call that repeats it, an error if it does not; none if `generation` is
  // another one's.
  std::optional<absl::StatusOr<StepResult>> RepeatedStep(uint64_t generation,
                                                         const std::vector<SessionMarks>& marks,
                                                         const StepRequest& request) const;

  // Seals the open window; what is waited for here, if anything, comes with one of the next three.
  void Begin(std::vector<SessionMarks> marks, EndsBy by);
  void BeginFlush(std::vector<SessionMarks> marks, FlushEnd flush, FlushCallback done);
  void BeginStep(std::vector<SessionMarks> marks, const StepRequest& request, StepCallback done);
  void BeginLook(std::vector<SessionMarks> marks, LookEnd look, StatsCallback done);
  void BeginBlend(BlendEnd blend, CommitCallback done);
  // How far a replica is, from one of these until the window is open again.
  EndingPhase phase() const { return phase_; }
  // By one with each of them.
  uint64_t ending() const { return ending_; }
  void Reach(EndingPhase phase) { phase_ = phase; }
  // What ends it, or looks at it. Only of a window that is not open.
  const EndsBy& by() const { return *by_; }
  bool stepping() const { return by_.has_value() && std::holds_alternative<StepRequest>(*by_); }
  bool looking() const { return by_.has_value() && std::holds_alternative<LookEnd>(*by_); }
  bool blending() const { return by_.has_value() && std::holds_alternative<BlendEnd>(*by_); }
  // Whether a look or a blend holds the window, which stays as it is.
  bool opens_again() const { return looking() || blending(); }
  const StepRequest& step() const { return std::get<StepRequest>(*by_); }
  const BlendRequest& blend() const { return std::get<BlendEnd>(*by_).request; }
  float flush_scale() const { return window_.flush_scale; }
  const FlushInfo& flush() const { return window_.flush; }
  const FlushRecord& committed() const { return window_.committed; }
  const FlushRecord& aborted() const { return window_.aborted; }
  absl::Time begun() const { return begun_; }
  absl::Time sealed_at() const { return sealed_at_; }

  // A call that comes to no answer, nor to an error, before a look or a blend is over, or what ends the
  // window.
  struct Behind {
    std::function<void()> again;
    std::function<void(const absl::Status&)> tell;
  };
  void WaitBehind(Behind behind) { behind_.push_back(std::move(behind)); }
  std::vector<std::function<void()>> TakeBehind();
  // Whether somebody waits for the end of the window, for that of a flush that holds it, a look or a blend.
  bool awaited() const;
  // Everybody who waits here, to be told something else than how it ended; those behind are left, or not.
  using Tell = std::function<void(const absl::Status&)>;
  std::vector<Tell> TakeCallers();
  std::vector<Tell> TakeAll();

  // What BeginFlush began to seal is sealed if `answer` is ok, and open again if not. Returns who waits for
  // the answer.
  std::vector<FlushCallback> Seal(absl::StatusOr<FlushInfo>* answer);
  // The step of BeginStep was taken if `answer` is ok, whose generation is filled in: the next window begins,
  // and the record is kept. Else the window is open again.
  std::vector<StepCallback> EndStep(absl::StatusOr<StepResult>* answer);
  // The window is open again. Returns who waits for what was found.
  std::vector<StatsCallback> EndLook();
  // The window is open again. Returns the callers that wait for the blended weights.
  std::vector<CommitCallback> EndBlend();
  // The window is open again, and what began to end it has come to nothing.
  std::vector<Tell> Reopen();

  // The generation that a repeated call of this kind was answered with; none if it is no repetition. ABORTED
  // if this flush does not hold the window.
  absl::StatusOr<std::optional<uint64_t>> CheckCommit(const std::string& flush_id) const;
  absl::StatusOr<std::optional<uint64_t>> CheckAbort(const std::string& flush_id) const;
  // Whether this fate is what its callers wait for, of whom `done` is one then; the first one begins it.
  // UNAVAILABLE while they wait for the other one.
  enum class Asked { kFirst, kAgain };
  absl::StatusOr<Asked> AskFor(FlushFate fate, FateCallback done);
  std::vector<FateCallback> TakeFateWaiters();
  // The fate of the flush that callers wait for; none: nobody waits.
  std::optional<FlushFate> asked_fate() const { return asked_fate_; }
  // A flush that holds the window is being ended.
  bool ends_flush() const { return asked_fate_.has_value(); }
  // The sealed window is gone, and the next one begins; or it is open again, with what came since.
  void Commit();
  void Abort();
  absl::Status UnknownFlush(const std::string& flush_id) const;

  // Checkpoints

  // Without what is only about to end the window, which has done nothing yet.
  Window Capture() const;
  // The window is this one from `now` on.
  void Install(Window window, absl::Time now);

 private:
  bool IsNext(uint64_t generation) const {
    return window_.state == WindowState::kSealed && generation == window_.generation + 1;
  }
  void Open();
  void BeginNext();
  void TakeBackNext();

  const Gradients gradients_;
  Window window_;
  bool in_second_ = false;
  std::optional<absl::Time> since_;
  std::optional<absl::Time> next_since_;  // likewise, of the next window

  // While sealed by a flush or a step; those who asked for the same again wait with the first.
  absl::Time begun_;
  absl::Time sealed_at_;
  EndingPhase phase_ = EndingPhase::kOpen;
  uint64_t ending_ = 0;
  std::optional<EndsBy> by_;
  std::vector<FlushCallback> flush_waiters_;
  std::vector<StepCallback> step_waiters_;
  std::vector<StatsCallback> stats_waiters_;
  std::vector<CommitCallback> blend_waiters_;
  std::optional<FlushFate> asked_fate_;  // while somebody waits for it
  std::vector<FateCallback> fate_waiters_;
  std::vector<Behind> behind_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_GRADIENT_WINDOW_H_
