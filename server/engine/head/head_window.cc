// How a head's gradient window ends, by a step of the optimizer or a flush (head_flush.cc).
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
// What flushes and steps have in common

absl::Status Head::CheckPastLocked(uint64_t generation, const std::vector<SessionMarks>& marks,
                                   const std::vector<SessionMarks>& known) const {
  for (const SessionMarks& session : marks) {
    if (history_.Has(generation, session)) continue;
    const bool same = std::any_of(known.begin(), known.end(), [&session](const SessionMarks& one) {
      return one.session_id == session.session_id && (!one.past.known() || one.past == session.past);
    });
    if (same) continue;
    absl::Status status = MakeError(
        absl::StatusCode::kAborted, RejectReason::kIncarnation, "marks",
        absl::StrCat(
            "marks of session ", session.session_id, " are of before head ", config_.name,
            " was restored from a checkpoint, or of another server: what they stand for may be undone"));
    AttachPosition(&status, {environment_.incarnation, window_.generation(), {}, history_.restores()});
    return status;
  }
  return absl::OkStatus();
}

// ABORTED with the server's position; FAILED_PRECONDITION for the window behind one that a flush still holds.
absl::Status Head::CheckPlaceLocked(uint64_t generation, const std::vector<SessionMarks>& marks) const {
  if (generation == window_.generation()) return CheckPastLocked(generation, marks, {});
  if (absl::Status behind = window_.CheckNotBehindFlush(generation); !behind.ok()) return behind;
  absl::Status status = PositionErrorLocked(
      absl::StatusCode::kAborted, RejectReason::kGeneration, "generation",
      absl::StrCat("generation is ", generation, "; the server is at ", window_.generation()), "");
  // That window came about in a past that a restore has undone.
  const HeadPast& now = history_.now();
  const bool undone = generation > window_.generation() &&
                      std::any_of(marks.begin(), marks.end(), [&now](const SessionMarks& session) {
                        return session.past.known() && session.past != now;
                      });
  if (undone) {
    AttachPosition(&status, {environment_.incarnation, window_.generation(), {}, history_.restores()});
  }
  return status;
}

absl::Status Head::CheckEndPlaceLocked(uint64_t generation, const std::vector<SessionMarks>& marks) const {
  std::vector<SessionMarks> own;
  return CheckPlaceLocked(generation, *OwnMarks(&marks, &own));
}

absl::Status Head::CheckSealableLocked(const std::vector<SessionMarks>& marks) const {
  if (!lifecycle_.admits().ok()) return lifecycle_.admits();
  if (absl::Status none = CheckNothingPreparedLocked(); !none.ok()) return none;
  std::vector<SessionMarks> own;
  return sessions_.Match(*OwnMarks(&marks, &own));
}

const std::vector<SessionMarks>* Head::OwnMarks(const std::vector<SessionMarks>* marks,
                                                std::vector<SessionMarks>* own) const {
  if (!environment_.place.shared()) return marks;
  *own = MarksAt(environment_.place, *marks);
  return own;
}

// Marks may have gone back since, if a stream was cut.
absl::Status Head::CheckSealedLocked() const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  if (window_.blending()) return CheckBlendableLocked();
  if (window_.looking() && window_.marks().empty()) return absl::OkStatus();
  std::vector<SessionMarks> own;
  if (absl::Status same = sessions_.Match(*OwnMarks(&window_.marks(), &own)); !same.ok()) return same;
  return sessions_.CheckAllAdded();
}

WindowGradient Head::WindowGradientLocked() const {
  return {gradients_.Of(window_.in_second()), sessions_.GradientsInOrder()};
}

Head::Resumes Head::BeginWindowLocked() {
  sessions_.BeginWindow();
  history_.BeginWindow();
  DropForgottenLocked();
  return TakeWaitingLocked();
}

Head::Resumes Head::TakeWaitingLocked() {
  Resumes waiting = sessions_.TakeWaiting();
  // Before the calls, which may change the weights again.
  for (auto& [session_id, student] : std::exchange(students_, {})) {
    waiting.push_back([student = std::move(student)] { student.Resume(); });
  }
  for (std::function<void()>& call : window_.TakeBehind()) waiting.push_back(std::move(call));
  return waiting;
}

void Head::PostLastLocked(LastTask last, std::function<void()> task) {
  last_tasks_.push_back(std::move(last));
  environment_.scheduler->PostLast(shared_from_this(), [self = shared_from_this(), task = std::move(task)] {
    self->BeginLastTask();
    task();
  });
}

// Everything that it has to wait for has ended, so its marks can be compared now. If they do not match, the
// call is going to fail and must change nothing: tiles stay as they are.
const Head::LastTask* Head::DueLastTaskLocked() const {
  if (last_tasks_.empty()) return nullptr;
  const LastTask& last = last_tasks_.front();
  return last.marks.has_value() && !sessions_.Match(*last.marks).ok() ? nullptr : &last;
}

void Head::BeginLastTask() {
  const MutexLock lock(mutex_);
  last_tasks_.pop_front();
}

void Head::PostWindowWorkLocked(std::function<void()> task) {
  ++window_work_;
  environment_.scheduler->Post(this, [self = shared_from_this(), task = std::move(task)] {
    task();
    ++self->gradient_changes_;
    self->EndWindowWork();
  });
}

void Head::EndWindowWork() {
  const MutexLock lock(mutex_);
  --window_work_;
}

// Steps

void Head::ApplyStep(uint64_t generation, std::vector<SessionMarks> marks, const StepRequest& request,
                     StepCallback done) {
  marks = Canonical(std::move(marks));
  std::optional<absl::StatusOr<StepResult>> answer;
  std::optional<WindowEnd> together;
  {
    const MutexLock lock(mutex_);
    answer = BeginStepLocked(generation, marks, request, done, &together);
  }
  if (together.has_value()) EndTogether(*std::move(together));
  if (!answer.has_value()) return;
  if (!answer->ok() || !environment_.place.shared()) return done(*std::move(answer));
  const WindowEnd taken{.generation = generation, .marks = std::move(marks), .by = request};
  AskWhetherTaken(taken, **answer, ReplicaPlace::kCoordinator + 1, std::move(done));
}

std::optional<absl::StatusOr<StepResult>> Head::BeginStepLocked(uint64_t generation,
                                                                const std::vector<SessionMarks>& marks,
                                                                const StepRequest& request,
                                                                StepCallback& done,
                                                                std::optional<WindowEnd>* together) {
  if (absl::Status right = CheckEndsWindows(); !right.ok()) return right;
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (absl::Status right = CheckStep(config_, request); !right.ok()) return right;
  if (auto repeated = RepeatedStepLocked(generation, marks, request); repeated.has_value()) return repeated;
  if (absl::Status place = CheckEndPlaceLocked(generation, marks); !place.ok()) return place;
  if (window_.opens_again()) {
    WaitBehindLocked(done, [generation, marks, request](Head& head, StepCallback again) {
      head.ApplyStep(generation, marks, request, std::move(again));
    });
    return std::nullopt;
  }
  if (window_.state() != WindowState::kOpen) return window_.JoinStep(marks, request, done);
  if (absl::Status weights = weights_.CheckPresent(); !weights.ok()) return weights;
  if (absl::Status may = CheckSealableLocked(marks); !may.ok()) return may;
  window_.BeginStep(marks, request, std::move(done));
  if (environment_.place.shared()) {
    *together = EndingLocked();
  } else {
    PostLastLocked({.changes_weights = true, .marks = marks}, [self = shared_from_this()] { self->Step(); });
  }
  return std::nullopt;
}

// A caller without an answer may have had losses computed before it asks again: its marks have moved, but not
// to another step.
std::optional<absl::StatusOr<StepResult>> Head::RepeatedStepLocked(uint64_t generation,
                                                                   const std::vector<SessionMarks>& marks,
                                                                   const StepRequest& request) {
  const StepRecord& last = window_.last_step();
  if (generation != last.generation) return std::nullopt;
  std::vector<SessionMarks> own;
  std::vector<SessionMarks> own_then;
  const std::vector<SessionMarks>& now = *OwnMarks(&marks, &own);
  const std::vector<SessionMarks>& then = *OwnMarks(&last.marks, &own_then);
  if (absl::Status past = CheckPastLocked(generation, now, last.marks); !past.ok()) return past;
  const bool may_have_moved = generation + 1 == window_.generation() && window_.state() == WindowState::kOpen;
  const bool moved = may_have_moved && sessions_.OnlyLookedSince(then, now);
  const bool same = moved || Same(then, now);
  auto answer = window_.RepeatedStep(generation, same ? last.marks : marks, request);
  // To the caller everything up to its marks is behind it, and need not be named again.
  if (moved && answer.has_value() && answer->ok()) sessions_.PassOver(now);
  return answer;
}

// Everything accepted before the step has been processed by now.
void Head::Step() {
  StepRequest request;
  WindowGradient gradient;
  int64_t steps = 0;
  uint64_t tokens = 0;
  absl::Status sealed;
  {
    const MutexLock lock(mutex_);
    request = window_.step();
    gradient = WindowGradientLocked();
    steps = weights_.optimizer_steps();
    tokens = window_.tokens();
    sealed = CheckSealedLocked();
  }
  absl::StatusOr<StepResult> answer = StepResult{};
  if (!sealed.ok()) {
    answer = sealed;
  } else if (tokens == 0) {
    // What never had a gradient is not stepped: neither weight decay nor a moment is at work.
    gradients_.Reset(gradient);
    answer->skipped = true;
  } else if (answer = TakeStep(request, gradient, steps); answer.ok()) {
    answer->window_tokens = tokens;
    CountGradient(answer->stats.norm, answer->stats.non_finite);
  } else {
    OnDeviceFailure(answer.status());
  }
  std::vector<StepCallback> step_waiters;
  Resumes waiting;
  StepSave save;
  {
    // All at once for everybody who looks: the new version, the record and the next window, or nothing.
    const MutexLock lock(mutex_);
    if (answer.ok()) CountStepLocked(&*answer);
    step_waiters = window_.EndStep(&answer);
    waiting = answer.ok() ? BeginWindowLocked() : TakeWaitingLocked();
    if (answer.ok()) save = CaptureStepLocked(*answer);
  }
  for (const StepCallback& waiter : step_waiters) waiter(answer);
  Call(waiting);
  BeginStepSave(std::move(save));
}

// On the device alone: afterwards the gradient, and those of the sessions, are empty.
absl::StatusOr<StepResult> Head::TakeStep(const StepRequest& request, const WindowGradient& gradient,
                                          int64_t steps) {
  if (absl::Status folded = gradients_.FoldSessions(gradient); !folded.ok()) return folded;
  StepResult result;
  if (request.non_finite == NonFinite::kSkip) {
    const absl::StatusOr<GradientTallies> tallies =
        backend_->Summarize(gradient.window, request.gradient_scale);
    if (!tallies.ok()) return tallies.status();
    result.stats = StatsOf(*tallies);
    result.skipped = result.stats.non_finite > 0;
  }
  if (!result.skipped) {
    const absl::StatusOr<GradientTallies> tallies =
        backend_->ApplyStep(gradient.window, Resolve(config_.optimizer, request, steps + 1));
    if (!tallies.ok()) return tallies.status();
    result.stats = StatsOf(*tallies);
  }
  backend_->Reset(gradient.window);
  return result;
}

void Head::CountStepLocked(StepResult* result) {
  Counters& counters = *environment_.counters;
  if (result->window_tokens == 0) {
    ++counters.steps_empty;
  } else if (result->skipped) {
    ++counters.steps_skipped;
  } else {
    weights_.NoteStep();
    ++counters.steps_applied;
    ++counters.weight_versions;
  }
  counters.step_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - window_.begun()));
  result->weight_version = weights_.version();
  result->step = weights_.optimizer_steps();
}

}  // namespace lossd::engine
