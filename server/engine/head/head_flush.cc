// The two-phase flush of a head's window, and how its gradient is read.
#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
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

// It begins

void Head::BeginFlush(uint64_t generation, std::vector<SessionMarks> marks, float gradient_scale,
                      FlushCallback done) {
  marks = Canonical(std::move(marks));
  std::optional<absl::StatusOr<FlushInfo>> answer;
  std::optional<WindowEnd> together;
  {
    const MutexLock lock(mutex_);
    answer = BeginFlushLocked(generation, marks, gradient_scale, done, &together);
  }
  if (answer.has_value()) done(*std::move(answer));
  if (together.has_value()) EndTogether(*std::move(together));
}

std::optional<absl::StatusOr<FlushInfo>> Head::BeginFlushLocked(uint64_t generation,
                                                                const std::vector<SessionMarks>& marks,
                                                                float gradient_scale, FlushCallback& done,
                                                                std::optional<WindowEnd>* together) {
  if (absl::Status right = CheckEndsWindows(); !right.ok()) return right;
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (absl::Status right = CheckFlushArguments(config_, gradient_scale); !right.ok()) return right;
  if (absl::Status place = CheckEndPlaceLocked(generation, marks); !place.ok()) return place;
  if (window_.opens_again()) {
    WaitBehindLocked(done, [generation, marks, gradient_scale](Head& head, const FlushCallback& again) {
      head.BeginFlush(generation, marks, gradient_scale, again);
    });
    return std::nullopt;
  }
  if (window_.state() != WindowState::kOpen) return window_.JoinFlush(marks, gradient_scale, done);
  if (absl::Status may = CheckSealableLocked(marks); !may.ok()) return may;
  window_.BeginFlush(marks, {RandomId(), gradient_scale}, std::move(done));
  if (environment_.place.shared()) {
    *together = EndingLocked();
  } else {
    PostLastLocked({.marks = marks}, [self = shared_from_this()] { self->Seal(); });
  }
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
    answer->flush_id = FlushIdOf(window_.by());
    answer->window_tokens = window_.tokens();
    if (absl::Status sealed = CheckSealedLocked(); !sealed.ok()) answer = sealed;
  }
  if (answer.ok()) {
    answer->rows = config_.vocab_size;
    answer->columns = config_.hidden_size;
    if (const auto stats = gradients_.Stats(gradient, scale); stats.ok()) {
      answer->stats = *stats;
    } else {
      OnDeviceFailure(stats.status());
      answer = stats.status();
    }
  }
  if (answer.ok()) CountGradient(answer->stats.norm, answer->stats.non_finite);
  std::vector<FlushCallback> flush_waiters;
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    flush_waiters = SealLocked(&answer);
    waiting = TakeWaitingLocked();
  }
  for (const FlushCallback& waiter : flush_waiters) waiter(answer);
  Call(waiting);
}

std::vector<FlushCallback> Head::SealLocked(absl::StatusOr<FlushInfo>* answer) {
  std::vector<FlushCallback> waiters = window_.Seal(answer);
  if (!answer->ok()) return waiters;
  sessions_.Seal();
  ++environment_.counters->flushes_begun;
  environment_.counters->flush_freeze_seconds.Observe(
      absl::ToDoubleSeconds(window_.sealed_at() - window_.begun()));
  return waiters;
}

// Its gradient is read

absl::Status Head::CheckFlush(const std::string& flush_id) const { return GradientOf(flush_id).status(); }

absl::StatusOr<std::pair<WindowGradient, float>> Head::GradientOf(const std::string& flush_id) const {
  const MutexLock lock(mutex_);
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  if (absl::Status right = CheckEndsWindows(); !right.ok()) return right;
  if (!window_.IsSealedBy(flush_id)) return window_.UnknownFlush(flush_id);
  return std::pair(WindowGradientLocked(), window_.flush_scale());
}

void Head::ReadGradient(const std::string& flush_id, int64_t first_row, int64_t rows, kernels::DataType type,
                        RowsOut out, std::function<void(absl::Status)> done) {
  if (environment_.place.shared()) {
    return ReadJointGradient(flush_id, {first_row, rows}, type, out, std::move(done));
  }
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

// It ends

void Head::CommitFlush(const std::string& flush_id, const FateCallback& done) {
  EndFlush(flush_id, FlushFate::kCommit, done);
}

void Head::AbortFlush(const std::string& flush_id, const FateCallback& done) {
  EndFlush(flush_id, FlushFate::kAbort, done);
}

void Head::EndFlush(const std::string& flush_id, FlushFate fate, const FateCallback& done) {
  std::optional<absl::StatusOr<uint64_t>> answer;
  std::optional<WindowEnd> together;
  std::optional<absl::Time> decided;
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    answer = AskForFateLocked(flush_id, fate, done, &together);
    if (!answer.has_value() && !environment_.place.shared()) {
      decided = absl::Now();
      answer = EndFlushLocked(fate, *decided, &waiting);
    }
  }
  if (decided.has_value()) FinishFlush(fate, *decided, waiting);
  if (answer.has_value()) done(*std::move(answer));
  if (together.has_value()) EndTogether(*std::move(together));
}

std::optional<absl::StatusOr<uint64_t>> Head::AskForFateLocked(const std::string& flush_id, FlushFate fate,
                                                               const FateCallback& done,
                                                               std::optional<WindowEnd>* together) {
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (absl::Status right = CheckEndsWindows(); !right.ok()) return right;
  const absl::StatusOr<std::optional<uint64_t>> repeated =
      fate == FlushFate::kCommit ? window_.CheckCommit(flush_id) : window_.CheckAbort(flush_id);
  if (!repeated.ok()) return repeated.status();
  if (repeated->has_value()) return **repeated;
  if (!environment_.place.shared()) return std::nullopt;
  const absl::StatusOr<GradientWindow::Asked> asked = window_.AskFor(fate, done);
  if (!asked.ok()) return asked.status();
  if (*asked == GradientWindow::Asked::kFirst) {
    *together = EndingLocked();
    (*together)->fate = fate;
  }
  return std::nullopt;
}

uint64_t Head::EndFlushLocked(FlushFate fate, absl::Time decided, Resumes* waiting) {
  Counters& counters = *environment_.counters;
  if (fate == FlushFate::kCommit) {
    // Posted under the lock, so before any chunk that is to be added to this gradient again.
    PostWindowWorkLocked(
        [self = shared_from_this(), flushed = WindowGradientLocked()] { self->gradients_.Reset(flushed); });
    window_.Commit();
    *waiting = BeginWindowLocked();
    ++counters.flushes_committed;
  } else {
    window_.Abort();
    sessions_.Reopen();
    if (gradients_.has_second()) {
      // Behind every chunk that was taken for the next window, and before any that comes now.
      PostWindowWorkLocked([self = shared_from_this(), second = window_.in_second()] {
        absl::Status folded = self->gradients_.FoldOther(second);
        if (!folded.ok()) self->OnDeviceFailure(folded);
      });
    }
    *waiting = TakeWaitingLocked();
    ++counters.flushes_aborted;
  }
  counters.flush_read_seconds.Observe(absl::ToDoubleSeconds(decided - window_.sealed_at()));
  return window_.generation();
}

void Head::FinishFlush(FlushFate fate, absl::Time decided, const Resumes& waiting) {
  Call(waiting);
  if (fate == FlushFate::kAbort) return;
  environment_.counters->flush_commit_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - decided));
}

}  // namespace lossd::engine
