// How a head's gradient window ends: the two-phase flush, and the step of the optimizer; and a look at it.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/random_id.h"
#include "server/engine/device/staging.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

absl::Status CheckFlushArguments(const HeadConfig& head, float gradient_scale) {
  if (head.weight_gradients == WeightGradients::kFrozen) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "head",
        absl::StrCat("head ", head.name, " is frozen: it has no gradient, and no window to flush"));
  }
  if (std::isfinite(gradient_scale)) return absl::OkStatus();
  return Invalid(RejectReason::kOption, "gradient_scale",
                 absl::StrCat("gradient_scale is ", gradient_scale, "; it must be finite"));
}

}  // namespace

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
absl::Status Head::CheckPlaceLocked(uint64_t generation, const std::vector<SessionMarks>& marks,
                                    const std::vector<SessionMarks>& known) const {
  if (generation == window_.generation()) return CheckPastLocked(generation, marks, known);
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

absl::Status Head::CheckSealableLocked(const std::vector<SessionMarks>& marks) const {
  if (!lifecycle_.admits().ok()) return lifecycle_.admits();
  if (absl::Status none = CheckNothingPreparedLocked(); !none.ok()) return none;
  std::vector<SessionMarks> own;
  return sessions_.Match(*OwnMarks(&marks, &own));
}

const std::vector<SessionMarks>* Head::OwnMarks(const std::vector<SessionMarks>* marks,
                                                std::vector<SessionMarks>* own) const {
  if (!environment_.place.shared()) return marks;
  *own = MarksAt(environment_.place.replica, *marks);
  return own;
}

// Marks may have gone back since, if a stream was cut.
absl::Status Head::CheckSealedLocked() const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  std::vector<SessionMarks> own;
  return sessions_.Match(*OwnMarks(&window_.marks(), &own));
}

WindowGradient Head::WindowGradientLocked() const {
  return {gradients_.Of(window_.in_second()), sessions_.GradientsInOrder()};
}

Head::Resumes Head::BeginWindowLocked() {
  sessions_.BeginWindow();
  history_.BeginWindow();
  DropForgottenLocked();
  return sessions_.TakeWaiting();
}

void Head::PostLastLocked(std::optional<std::vector<SessionMarks>> marks, std::function<void()> task) {
  last_tasks_.push_back(std::move(marks));
  environment_.scheduler->PostLast(shared_from_this(), [self = shared_from_this(), task = std::move(task)] {
    self->BeginLastTask();
    task();
  });
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

// Flush

void Head::BeginFlush(uint64_t generation, std::vector<SessionMarks> marks, float gradient_scale,
                      FlushCallback done) {
  marks = Canonical(std::move(marks));
  std::optional<absl::StatusOr<FlushInfo>> answer;
  {
    const MutexLock lock(mutex_);
    answer = BeginFlushLocked(generation, marks, gradient_scale, done);
  }
  if (answer.has_value()) done(*std::move(answer));
}

std::optional<absl::StatusOr<FlushInfo>> Head::BeginFlushLocked(uint64_t generation,
                                                                const std::vector<SessionMarks>& marks,
                                                                float gradient_scale, FlushCallback& done) {
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (absl::Status alone = CheckAlone("it is not flushed"); !alone.ok()) return alone;
  if (absl::Status right = CheckFlushArguments(config_, gradient_scale); !right.ok()) return right;
  if (absl::Status place = CheckPlaceLocked(generation, marks); !place.ok()) return place;
  if (window_.state() != WindowState::kOpen) return window_.JoinFlush(marks, gradient_scale, done);
  if (absl::Status may = CheckSealableLocked(marks); !may.ok()) return may;
  window_.BeginFlush(marks, gradient_scale, std::move(done));
  PostLastLocked(marks, [self = shared_from_this()] { self->Seal(); });
  return std::nullopt;
}

// Everything accepted before the flush has been processed by now.
void Head::Seal() {
  absl::StatusOr<FlushInfo> answer = FlushInfo{};
  WindowGradient gradient;
  float scale = 1.0f;
  {
    const MutexLock lock(mutex_);
    gradient = WindowGradientLocked();
    scale = window_.flush_scale();
    if (absl::Status sealed = CheckSealedLocked(); !sealed.ok()) answer = sealed;
  }
  if (answer.ok()) {
    answer->flush_id = RandomId();
    answer->rows = config_.vocab_size;
    answer->columns = config_.hidden_size;
    if (absl::Status summarized = gradients_.Summarize(gradient, scale, &*answer); !summarized.ok()) {
      OnDeviceFailure(summarized);
      answer = summarized;
    }
  }
  if (answer.ok()) {
    CountGradient(answer->summary.norm,
                  answer->summary.non_finite + (answer->bias_summary ? answer->bias_summary->non_finite : 0));
  }
  std::vector<FlushCallback> flush_waiters;
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    flush_waiters = window_.Seal(&answer);
    if (answer.ok()) {
      sessions_.Seal();
      ++environment_.counters->flushes_begun;
      environment_.counters->flush_freeze_seconds.Observe(
          absl::ToDoubleSeconds(window_.sealed_at() - window_.begun()));
    }
    waiting = sessions_.TakeWaiting();
  }
  for (const FlushCallback& waiter : flush_waiters) waiter(answer);
  Call(waiting);
}

absl::Status Head::CheckFlush(const std::string& flush_id) const { return GradientOf(flush_id).status(); }

absl::StatusOr<std::pair<WindowGradient, float>> Head::GradientOf(const std::string& flush_id) const {
  const MutexLock lock(mutex_);
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  if (!window_.IsSealedBy(flush_id)) return window_.UnknownFlush(flush_id);
  return std::pair(WindowGradientLocked(), window_.flush_scale());
}

void Head::ReadGradient(const std::string& flush_id, int64_t first_row, int64_t rows, kernels::DataType type,
                        RowsOut out, std::function<void(absl::Status)> done) {
  environment_.scheduler->Post(
      this, [self = shared_from_this(), flush_id, first_row, rows, type, out, done = std::move(done)] {
        done(self->ReadRows(flush_id, first_row, rows, type, out));
      });
}

absl::Status Head::ReadRows(const std::string& flush_id, int64_t first_row, int64_t rows,
                            kernels::DataType type, RowsOut out) {
  const absl::StatusOr<std::pair<WindowGradient, float>> read = GradientOf(flush_id);
  if (!read.ok()) return read.status();
  const auto& [gradient, scale] = *read;
  const bool wanted_wide = type == kernels::DataType::kFloat32;
  const int64_t count = rows * config_.hidden_size;
  ResultBytes memory = wanted_wide ? ResultBytes() : StagedResult(count * 4, environment_.device);
  auto* wide = static_cast<float*>(wanted_wide ? out.matrix : memory.data());
  absl::Status status = gradients_.ReadRows(gradient, scale, first_row, rows, wide);
  if (status.ok() && out.bias != nullptr && config_.bias) {
    status = gradients_.ReadBias(gradient, scale, first_row, rows, out.bias);
  }
  if (!status.ok()) {
    OnDeviceFailure(status);
  } else if (!wanted_wide) {
    kernels::Convert(kernels::DataType::kFloat32, wide, type, out.matrix, count);
  }
  return status;
}

absl::StatusOr<uint64_t> Head::CommitFlush(const std::string& flush_id) {
  const absl::Time begun = absl::Now();
  Resumes waiting;
  uint64_t generation = 0;
  {
    const MutexLock lock(mutex_);
    if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
    const absl::StatusOr<std::optional<uint64_t>> repeated = window_.CheckCommit(flush_id);
    if (!repeated.ok()) return repeated.status();
    if (repeated->has_value()) return **repeated;
    // Posted under the lock, so before any chunk that is to be added to this gradient again.
    PostWindowWorkLocked(
        [self = shared_from_this(), flushed = WindowGradientLocked()] { self->gradients_.Reset(flushed); });
    window_.Commit();
    waiting = BeginWindowLocked();
    generation = window_.generation();
    ++environment_.counters->flushes_committed;
    environment_.counters->flush_read_seconds.Observe(absl::ToDoubleSeconds(begun - window_.sealed_at()));
  }
  Call(waiting);
  environment_.counters->flush_commit_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - begun));
  return generation;
}

absl::StatusOr<uint64_t> Head::AbortFlush(const std::string& flush_id) {
  Resumes waiting;
  uint64_t generation = 0;
  {
    const MutexLock lock(mutex_);
    if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
    const absl::StatusOr<std::optional<uint64_t>> repeated = window_.CheckAbort(flush_id);
    if (!repeated.ok()) return repeated.status();
    if (repeated->has_value()) return **repeated;
    window_.Abort();
    sessions_.Reopen();
    if (gradients_.has_second()) {
      // Behind every chunk that was taken for the next window, and before any that comes now.
      PostWindowWorkLocked([self = shared_from_this(), second = window_.in_second()] {
        absl::Status folded = self->gradients_.FoldOther(second);
        if (!folded.ok()) self->OnDeviceFailure(folded);
      });
    }
    generation = window_.generation();
    ++environment_.counters->flushes_aborted;
    environment_.counters->flush_read_seconds.Observe(
        absl::ToDoubleSeconds(absl::Now() - window_.sealed_at()));
    waiting = sessions_.TakeWaiting();
  }
  Call(waiting);
  return generation;
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
  if (answer.has_value()) done(*std::move(answer));
  if (together.has_value()) environment_.end_together(shared_from_this(), *std::move(together));
}

std::optional<absl::StatusOr<StepResult>> Head::BeginStepLocked(uint64_t generation,
                                                                const std::vector<SessionMarks>& marks,
                                                                const StepRequest& request,
                                                                StepCallback& done,
                                                                std::optional<WindowEnd>* together) {
  if (absl::Status right = CheckEndsWindows(); !right.ok()) return right;
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (absl::Status right = CheckStep(config_, request); !right.ok()) return right;
  if (absl::Status there = CheckReplicasOf(marks); !there.ok()) return there;
  if (auto repeated = RepeatedStepLocked(generation, marks, request); repeated.has_value()) return repeated;
  // A coordinator that was filled goes on with marks of the process before it.
  const bool goes_on = environment_.place.shared() && window_.stepping();
  const std::vector<SessionMarks> known = goes_on ? window_.marks() : std::vector<SessionMarks>();
  std::vector<SessionMarks> own;
  absl::Status place = CheckPlaceLocked(generation, *OwnMarks(&marks, &own), known);
  if (!place.ok()) return place;
  if (window_.state() != WindowState::kOpen) return window_.JoinStep(marks, request, done);
  if (absl::Status weights = weights_.CheckPresent(); !weights.ok()) return weights;
  if (absl::Status may = CheckSealableLocked(marks); !may.ok()) return may;
  window_.BeginStep(marks, request, std::move(done));
  if (environment_.place.shared()) {
    *together = EndingLocked();
  } else {
    PostLastLocked(marks, [self = shared_from_this()] { self->Step(); });
  }
  return std::nullopt;
}

// A caller without an answer may have had losses computed before it asks again: its marks have moved, but not
// to another step.
std::optional<absl::StatusOr<StepResult>> Head::RepeatedStepLocked(uint64_t generation,
                                                                   const std::vector<SessionMarks>& marks,
                                                                   const StepRequest& request) {
  const StepRecord& last = window_.last_step();
  if (generation == last.generation) {
    std::vector<SessionMarks> own;
    absl::Status past = CheckPastLocked(generation, *OwnMarks(&marks, &own), last.marks);
    if (!past.ok()) return past;
  }
  const bool may_have_moved = generation == last.generation && generation + 1 == window_.generation() &&
                              window_.state() == WindowState::kOpen;
  const bool moved = may_have_moved && sessions_.OnlyLookedSince(last.marks, marks);
  auto answer = window_.RepeatedStep(generation, moved ? last.marks : marks, request);
  // To the caller everything up to its marks is behind it, and need not be named again.
  if (moved && answer.has_value() && answer->ok()) sessions_.PassOver(marks);
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
  {
    // All at once for everybody who looks: the new version, the record and the next window, or nothing.
    const MutexLock lock(mutex_);
    if (answer.ok()) CountStepLocked(&*answer);
    step_waiters = window_.EndStep(&answer);
    waiting = answer.ok() ? BeginWindowLocked() : sessions_.TakeWaiting();
  }
  for (const StepCallback& waiter : step_waiters) waiter(answer);
  Call(waiting);
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

// What the window is like

void Head::ReadStats(uint64_t generation, std::vector<SessionMarks> marks, double gradient_scale,
                     std::function<void(absl::StatusOr<WindowStats>)> done) {
  marks = Canonical(std::move(marks));
  absl::Status refused;
  if (!IsScale(gradient_scale)) {
    refused = Invalid(RejectReason::kOption, "gradient_scale",
                      absl::StrCat("gradient_scale is ", gradient_scale, "; it must be finite in fp32"));
  } else {
    const MutexLock lock(mutex_);
    refused = CheckStatsLocked(generation, marks);
    if (refused.ok()) {
      auto task = [self = shared_from_this(), generation, marks, gradient_scale, done = std::move(done)] {
        done(self->StatsNow(generation, marks, gradient_scale));
      };
      if (marks.empty()) {
        environment_.scheduler->Post(this, std::move(task));
      } else {
        PostLastLocked(std::move(marks), std::move(task));
      }
      return;
    }
  }
  done(refused);
}

absl::Status Head::CheckStatsLocked(uint64_t generation, const std::vector<SessionMarks>& marks) const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  if (absl::Status alone = CheckAlone("its gradient is at all of them"); !alone.ok()) return alone;
  if (frozen()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "head",
                     absl::StrCat("head ", config_.name, " is frozen: it has no gradient"));
  }
  if (absl::Status place = CheckPlaceLocked(generation, marks); !place.ok()) return place;
  // BeginFlush returned the statistics of a sealed window already.
  if (window_.state() == WindowState::kSealed) return window_.CheckOpen();
  return marks.empty() ? absl::OkStatus() : sessions_.Match(marks);
}

absl::StatusOr<Head::WindowStats> Head::StatsNow(uint64_t generation, const std::vector<SessionMarks>& marks,
                                                 double gradient_scale) {
  WindowStats stats;
  WindowGradient gradient;
  {
    const MutexLock lock(mutex_);
    // Much may have happened while it waited.
    if (absl::Status status = CheckStatsLocked(generation, marks); !status.ok()) return status;
    gradient = WindowGradientLocked();
    stats.window_tokens = window_.tokens();
  }
  absl::StatusOr<GradientStats> of_gradient = gradients_.Stats(gradient, gradient_scale);
  if (!of_gradient.ok()) {
    OnDeviceFailure(of_gradient.status());
    return of_gradient.status();
  }
  stats.gradient = *of_gradient;
  CountGradient(stats.gradient.norm, stats.gradient.non_finite);
  return stats;
}

}  // namespace lossd::engine
