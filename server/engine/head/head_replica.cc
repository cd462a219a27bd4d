// One replica's part in the end of a window, which all replicas of the head end together:
// docs/decisions/0022-replicas.md.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

// Whether `end` names no marks, and takes the window with whatever is in it.
bool TakesAll(const WindowEnd& end) {
  if (std::holds_alternative<BlendEnd>(end.by)) return true;
  return end.marks.empty() && std::holds_alternative<LookEnd>(end.by);
}

}  // namespace

absl::Status Head::CheckEndsWindows() const {
  if (!environment_.place.shared() || environment_.place.coordinates()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("this server is replica ", environment_.place.replica,
                                                    "; windows are ended by replica ",
                                                    ReplicaPlace::kCoordinator));
}

absl::Status Head::CheckPhaseLocked(uint64_t ending, EndingPhase phase) const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  const bool ends = window_.state() != WindowState::kOpen && window_.ending() == ending;
  if (ends && window_.phase() == phase) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the end of window ", window_.generation(), " of head ",
                                          config_.name, " is not that far, or it is another one"));
}

uint64_t Head::EndingNumber() const {
  const MutexLock lock(mutex_);
  return window_.ending();
}

MetPart Head::MeetPart() const {
  const MutexLock lock(mutex_);
  const bool restored_in_part =
      joint_.restoring == RestorePhase::kOverwritten || joint_.restoring == RestorePhase::kReady;
  return {.place = PlaceLocked(), .broken = restored_in_part || window_.phase() == EndingPhase::kStepping};
}

void Head::GoOnPart(const absl::Status& why) {
  ReopenPart(why);
  DropPrepared(why);
  TellWaiting(why);
  CancelRestorePart();
  Resumes waiting;
  {
    // The head may have been abandoned in an epoch that was over before it went back.
    const MutexLock lock(mutex_);
    lifecycle_.EndRestore();
    waiting = TakeWaitingLocked();
  }
  Call(waiting);
}

void Head::AbandonPart(const absl::Status& why) {
  std::vector<GradientWindow::Tell> callers;
  absl::Status goes_back;
  bool takes_chunks = false;
  {
    const MutexLock lock(mutex_);
    goes_back = GoesBackLocked();
    takes_chunks = !lifecycle_.restoring();
    // Its line at the device is paused: some rows are new, or all are those of a checkpoint that does not
    // count.
    const bool overwritten =
        window_.phase() == EndingPhase::kStepping || joint_.restoring == RestorePhase::kReady;
    if (overwritten) joint_.restoring = RestorePhase::kOverwritten;
    if (window_.state() == WindowState::kSealing) callers = window_.Reopen();
    joint_.restored.reset();
    lifecycle_.BeginRestore(goes_back);
  }
  for (const GradientWindow::Tell& tell : callers) tell(why);
  DropPrepared(why);
  TellWaiting(why);
  // The restore discards this head's queued chunks. A teacher of theirs may be restored first, and waits
  // until they give back their leases.
  if (takes_chunks) EndStreams(goes_back);
}

absl::Status Head::GoesBackLocked() const {
  return MakeError(absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
                   absl::StrCat("head ", config_.name,
                                " goes back to its newest checkpoint, since its replicas are not alike; try "
                                "again"));
}

WindowEnd Head::EndingLocked() const {
  return {.generation = window_.generation(),
          .marks = window_.marks(),
          .by = window_.by(),
          .weight_version = weights_.version(),
          .optimizer_steps = weights_.optimizer_steps(),
          .ending = window_.ending()};
}

absl::Status Head::CheckMayPublishLocked() const {
  if (!environment_.place.shared()) return absl::OkStatus();
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (joint_.saving) {
    return absl::UnavailableError(
        absl::StrCat("head ", config_.name,
                     " is being saved at all replicas; write the weights again when "
                     "it is"));
  }
  if (window_.state() == WindowState::kOpen) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("window ", window_.generation(), " of head ", config_.name,
                   " is being ended at all replicas; write the weights again when it is"));
}

absl::Status Head::CheckNothingPreparedLocked() const {
  if (!environment_.place.shared() || weights_.committing().empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      "weights of head ", config_.name, " are being published at all replicas; ask again when they are"));
}

absl::Status Head::CheckSameWeightsLocked(const WindowEnd& end) const {
  if (end.weight_version == weights_.version() && end.optimizer_steps == weights_.optimizer_steps()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the weights of head ", config_.name, " are of version ", weights_.version(), " after ",
                   weights_.optimizer_steps(), " steps; those of replica ", ReplicaPlace::kCoordinator,
                   " of version ", end.weight_version, " after ", end.optimizer_steps));
}

EndingPhase Head::phase() const {
  const MutexLock lock(mutex_);
  return window_.phase();
}

bool Head::IsEnding(const WindowEnd& end) const {
  const MutexLock lock(mutex_);
  if (window_.state() == WindowState::kOpen || window_.ending() != end.ending) return false;
  return !end.fate.has_value() || window_.asked_fate() == end.fate;
}

bool Head::IsBlending() const {
  const MutexLock lock(mutex_);
  return window_.blending();
}

void Head::PostExchange(std::function<void()> task) {
  environment_.scheduler->Post(nullptr, std::move(task));
}

absl::Status Head::CheckAlive() const {
  const MutexLock lock(mutex_);
  return lifecycle_.alive();
}

// Seal

void Head::SealPart(const WindowEnd& end, const std::function<void(absl::StatusOr<SealedWindow>)>& done) {
  std::optional<absl::StatusOr<SealedWindow>> answer;
  absl::Status begun;
  if (const auto* const blend = std::get_if<BlendEnd>(&end.by); blend != nullptr) {
    begun = SourceVersion(blend->request).status();
  }
  {
    const MutexLock lock(mutex_);
    answer = TakenPartLocked(end);
    if (!answer.has_value() && begun.ok()) begun = BeginPartLocked(end);
    if (!begun.ok()) answer = begun;
    if (!answer.has_value()) {
      std::optional<std::vector<SessionMarks>> marks;
      if (!TakesAll(end)) marks = MarksAt(environment_.place, end.marks);
      // A look without marks leaves incomplete tiles of deterministic sessions alone.
      const bool leaves = TakesAll(end) && !ChangesWeights(end.by);
      PostLastLocked({.closes = leaves ? LastTask::Closes::kNone : LastTask::Closes::kAll,
                      .changes_weights = ChangesWeights(end.by),
                      .marks = std::move(marks)},
                     [self = shared_from_this(), epoch = joint_.epoch, ending = window_.ending(), end, done] {
                       self->SealUntaught(epoch, ending, end, done);
                     });
    }
  }
  if (answer.has_value()) done(*std::move(answer));
}

// The marks of a session can be judged where it lives alone.
void Head::AskWhetherTaken(const WindowEnd& taken, const StepResult& answer, int32_t replica,
                           StepCallback done) {
  if (replica == environment_.place.replicas) return done(answer);
  const absl::StatusOr<std::shared_ptr<ReplicaPart>> part = environment_.find_part(*this, replica);
  if (!part.ok()) return done(part.status());
  (*part)->Seal(taken, [self = shared_from_this(), taken, answer, replica,
                        done = std::move(done)](const absl::StatusOr<SealedWindow>& same) {
    if (!same.ok()) return done(same.status());
    self->AskWhetherTaken(taken, answer, replica + 1, done);
  });
}

std::optional<absl::StatusOr<SealedWindow>> Head::TakenPartLocked(const WindowEnd& end) {
  const auto* const step = std::get_if<StepRequest>(&end.by);
  if (step == nullptr || end.generation != window_.last_step().generation) return std::nullopt;
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  const auto taken = RepeatedStepLocked(end.generation, end.marks, *step);
  if (!taken.has_value()) return std::nullopt;
  if (!taken->ok()) return taken->status();
  return SealedWindow{(*taken)->window_tokens};
}

absl::Status Head::BeginPartLocked(const WindowEnd& end) {
  // The coordinator has checked it all when the call came, and holds the window since.
  if (environment_.place.coordinates()) return CheckPhaseLocked(end.ending, EndingPhase::kOpen);
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  absl::Status place = CheckPlaceLocked(end.generation, MarksAt(environment_.place, end.marks));
  if (!place.ok()) return place;
  if (absl::Status open = window_.CheckOpen(); !open.ok()) return open;
  const bool steps = std::holds_alternative<StepRequest>(end.by);
  if (absl::Status weights = weights_.CheckPresent(); steps && !weights.ok()) return weights;
  if (absl::Status same = CheckSameWeightsLocked(end); !same.ok()) return same;
  if (const auto* const blend = std::get_if<BlendEnd>(&end.by); blend != nullptr) {
    if (absl::Status can = BeginBlendLocked(blend->request).status(); !can.ok()) return can;
  } else if (!TakesAll(end)) {
    if (absl::Status may = CheckSealableLocked(end.marks); !may.ok()) return may;
  }
  window_.Begin(end.marks, end.by);
  return absl::OkStatus();
}

// Everything accepted before the window was sealed has been processed by now.
void Head::SealUntaught(uint64_t epoch, uint64_t ending, const WindowEnd& end,
                        const std::function<void(absl::StatusOr<SealedWindow>)>& done) {
  if (ChangesWeights(end.by)) {
    const MutexLock lock(mutex_);
    const bool goes_on = CheckEpochLocked(epoch).ok() && CheckPhaseLocked(ending, EndingPhase::kOpen).ok();
    if (goes_on && lessons_->taken() > 0) {
      return lessons_->WhenNone([self = shared_from_this(), epoch, ending, end, done] {
        self->PostExchange(
            [self, epoch, ending, end, done] { self->SealUntaught(epoch, ending, end, done); });
      });
    }
  }
  done(SealedPart(epoch, ending, end));
}

absl::StatusOr<SealedWindow> Head::SealedPart(uint64_t epoch, uint64_t ending, const WindowEnd& end) {
  const MutexLock lock(mutex_);
  if (absl::Status same = CheckEpochLocked(epoch); !same.ok()) return same;
  if (absl::Status phase = CheckPhaseLocked(ending, EndingPhase::kOpen); !phase.ok()) return phase;
  if (absl::Status sealed = CheckSealedLocked(); !sealed.ok()) return sealed;
  // A write that was committed before may have been published meanwhile.
  if (absl::Status same = CheckSameWeightsLocked(end); !same.ok()) return same;
  window_.Reach(EndingPhase::kSealed);
  return SealedWindow{window_.tokens(), sessions_.RanksInOrder()};
}

// Sum

void Head::SumPart(JointSum sum, std::shared_ptr<const ReplicaCommunicators> replicas,
                   std::function<void(absl::StatusOr<GradientStats>)> done) {
  PostExchange([self = shared_from_this(), ending = EndingNumber(), sum = std::move(sum),
                replicas = std::move(replicas),
                done = std::move(done)] { done(self->SumNow(ending, sum, *replicas)); });
}

absl::StatusOr<GradientStats> Head::SumNow(uint64_t ending, const JointSum& sum,
                                           const ReplicaCommunicators& replicas) {
  WindowGradient gradient;
  double scale = 1;
  bool is_read = false;
  {
    const MutexLock lock(mutex_);
    if (absl::Status phase = CheckPhaseLocked(ending, EndingPhase::kSealed); !phase.ok()) return phase;
    gradient = WindowGradientLocked();
    scale = ScaleOf(window_.by());
    is_read = !FlushIdOf(window_.by()).empty();
  }
  // What nothing was added to is added up only if somebody reads it.
  const bool empty = sum.window_tokens == 0 && !is_read;
  absl::StatusOr<GradientTallies> tallies = GradientTallies();
  if (!empty) {
    const absl::Status summed = AddUp(gradient, sum.sessions, replicas);
    tallies = summed.ok() ? backend_->TallySum(scale, replicas) : summed;
  }
  if (!tallies.ok()) {
    if (!absl::IsUnavailable(tallies.status())) OnDeviceFailure(tallies.status());
    return tallies.status();
  }
  const MutexLock lock(mutex_);
  window_.Reach(EndingPhase::kSummed);
  return empty ? GradientStats() : StatsOf(*tallies);
}

absl::Status Head::AddUp(const WindowGradient& gradient, const std::vector<int32_t>& sessions,
                         const ReplicaCommunicators& replicas) {
  const int32_t self = environment_.place.replica;
  if (std::count(sessions.begin(), sessions.end(), self) != std::ssize(gradient.sessions)) {
    return absl::InternalError(absl::StrCat("head ", config_.name, " has gradients of ",
                                            gradient.sessions.size(),
                                            " deterministic sessions, which are not those that are summed"));
  }
  absl::Status added = backend_->SumSlices(gradient.window, replicas);
  auto next = gradient.sessions.begin();
  for (size_t i = 0; added.ok() && i < sessions.size(); ++i) {
    added = backend_->AddToSum(sessions[i] == self ? *next++ : nullptr, sessions[i], replicas);
  }
  return added;
}

// Step

void Head::StepPart(const JointStep& step, std::shared_ptr<const ReplicaCommunicators> replicas,
                    std::function<void(absl::Status)> done) {
  PostExchange([self = shared_from_this(), ending = EndingNumber(), step, replicas = std::move(replicas),
                done = std::move(done)] { done(self->StepNow(ending, step, *replicas)); });
}

absl::Status Head::StepNow(uint64_t ending, const JointStep& step, const ReplicaCommunicators& replicas) {
  WindowGradient gradient;
  StepArguments arguments;
  std::optional<BlendRequest> blend;
  {
    const MutexLock lock(mutex_);
    const EndingPhase before = window_.blending() ? EndingPhase::kSealed : EndingPhase::kSummed;
    if (absl::Status phase = CheckPhaseLocked(ending, before); !phase.ok()) return phase;
    if (window_.blending()) {
      blend = window_.blend();
    } else if (window_.stepping()) {
      arguments = Resolve(config_.optimizer, window_.step(), weights_.optimizer_steps() + 1);
    } else {
      return absl::InternalError("what ends the window changes no weights");
    }
    window_.Reach(EndingPhase::kStepping);
    gradient = WindowGradientLocked();
    // Weights are there once: some rows are new from here on, and others old.
    environment_.scheduler->Pause(this);
  }
  absl::Status status;
  if (blend.has_value()) {
    status = BlendPart(*blend, replicas);
  } else if (!step.skipped) {
    status = backend_->StepSlices(arguments);
    if (status.ok()) status = backend_->GatherSlices(replicas);
  }
  if (status.ok() && !blend.has_value()) {
    gradients_.Reset(gradient);
    ++gradient_changes_;
  } else if (!status.ok() && !absl::IsUnavailable(status)) {
    OnDeviceFailure(status);
  }
  return status;
}

void Head::PublishPart(const JointStep& step) {
  if (IsBlending()) return PublishBlend();
  absl::StatusOr<StepResult> answer =
      StepResult{.skipped = step.skipped, .stats = step.stats, .window_tokens = step.window_tokens};
  std::vector<StepCallback> waiters;
  Resumes waiting;
  StepSave save;
  {
    const MutexLock lock(mutex_);
    CountStepLocked(&*answer);
    waiters = window_.EndStep(&answer);
    waiting = BeginWindowLocked();
    save = CaptureStepLocked(*answer);
  }
  if (step.window_tokens > 0) CountGradient(step.stats.norm, step.stats.non_finite);
  environment_.scheduler->Resume(this);
  for (const StepCallback& waiter : waiters) waiter(answer);
  Call(waiting);
  BeginStepSave(std::move(save));
}

// What becomes of it otherwise

void Head::ReopenPart(const absl::Status& why, std::optional<uint64_t> ending) {
  std::vector<GradientWindow::Tell> callers;
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    if (window_.state() != WindowState::kSealing || window_.phase() == EndingPhase::kStepping) return;
    if (ending.has_value() && window_.ending() != *ending) return;
    callers = window_.Reopen();
    waiting = TakeWaitingLocked();
  }
  for (const GradientWindow::Tell& tell : callers) tell(why);
  Call(waiting);
}

void Head::GiveUpEnding(const absl::Status& why, const WindowEnd& end) {
  if (end.fate.has_value()) return TellWaiting(why, end.ending);
  ReopenPart(why, end.ending);
}

void Head::TellWaiting(const absl::Status& why, std::optional<uint64_t> ending) {
  std::vector<GradientWindow::Tell> waiters;
  {
    const MutexLock lock(mutex_);
    if (ending.has_value() && window_.ending() != *ending) return;
    waiters = window_.TakeAll();
  }
  for (const GradientWindow::Tell& tell : waiters) tell(why);
}

}  // namespace lossd::engine
