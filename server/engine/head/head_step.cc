// The optimizer at work on a head's window: what the gradient is like, and the step that consumes it.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/gradient_summary.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

float LargestFinite(std::span<const float> values, float largest) {
  for (const float value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

}  // namespace

void Head::ApplyStep(uint64_t generation, std::vector<SessionMarks> marks, const StepRequest& request,
                     StepCallback done) {
  marks = Canonical(std::move(marks));
  std::optional<absl::StatusOr<StepResult>> answer;
  {
    const std::lock_guard lock(mutex_);
    answer = BeginStepLocked(generation, std::move(marks), request, done);
  }
  if (answer.has_value()) done(*std::move(answer));
}

std::optional<absl::StatusOr<StepResult>> Head::BeginStepLocked(uint64_t generation,
                                                                std::vector<SessionMarks> marks,
                                                                const StepRequest& request,
                                                                StepCallback& done) {
  if (!ended_.ok()) return ended_;
  if (!restoring_.ok()) return restoring_;
  if (absl::Status right = CheckStep(config_, request); !right.ok()) return right;
  if (const StepRecord& last = window_.last_step; generation > 0 && generation == last.generation) {
    // Who asks what became of it, and no longer knows the marks, names none.
    absl::Status same = CheckSameStep(last, marks.empty() ? last.marks : marks, request, "was applied");
    if (!same.ok()) return same;
    return last.result;
  }
  if (absl::Status place = CheckGenerationLocked(generation); !place.ok()) return place;
  if (window_.step.has_value()) {
    const StepRecord first{generation, window_.marks, *window_.step, {}};
    absl::Status same = CheckSameStep(first, marks, request, "is under way");
    if (!same.ok()) return same;
    window_.step_waiters.push_back(std::move(done));
    return std::nullopt;
  }
  if (absl::Status open = CheckOpenLocked(); !open.ok()) return open;
  if (weight_version_ == 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, "head",
                     absl::StrCat("head ", config_.name, " has no weights yet"));
  }
  if (!draining_.ok()) return draining_;
  if (absl::Status match = ledger_.Match(marks); !match.ok()) return match;
  window_.state = WindowState::kFreezing;
  window_.marks = std::move(marks);
  window_.step = request;
  window_.step_waiters.push_back(std::move(done));
  window_.step_begun = absl::Now();
  PostLastLocked(window_.marks, [self = shared_from_this()] { self->Step(); });
  return std::nullopt;
}

// Everything accepted before has been processed by now. Marks may have gone back since, if a stream was cut.
void Head::Step() {
  StepRequest request;
  Gradient* gradient = nullptr;
  int64_t steps = 0;
  absl::Status ready;
  {
    const std::lock_guard lock(mutex_);
    request = *window_.step;
    gradient = window_gradient_;
    steps = optimizer_steps_;
    ready = ended_.ok() ? ledger_.Match(window_.marks) : ended_;
  }
  absl::StatusOr<StepResult> answer = StepResult{};
  if (ready.ok()) {
    answer = TakeStep(request, gradient, steps);
    if (answer.ok()) {
      CountGradient(answer->stats.norm, answer->stats.non_finite);
    } else {
      EndByFailure(answer.status());
    }
  } else {
    answer = ready;
  }
  std::vector<StepCallback> step_waiters;
  std::vector<std::function<void()>> window_waiters;
  {
    const std::lock_guard lock(mutex_);
    step_waiters = std::exchange(window_.step_waiters, {});
    window_waiters = EndStepLocked(answer);
  }
  for (const StepCallback& waiter : step_waiters) waiter(answer);
  for (const auto& waiter : window_waiters) waiter();
}

// On the device alone: afterwards the gradient, and those of the sessions, are empty.
absl::StatusOr<StepResult> Head::TakeStep(const StepRequest& request, Gradient* gradient, int64_t steps) {
  for (const auto& session : DeterministicInOrder()) {
    absl::Status folded = backend_->Fold(session->memory.gradient.get(), gradient);
    if (!folded.ok()) return folded;
  }
  StepResult result;
  if (request.non_finite == NonFinite::kSkip) {
    const absl::StatusOr<GradientStats> stats = backend_->Summarize(gradient, request.gradient_scale);
    if (!stats.ok()) return stats.status();
    result.stats = *stats;
    result.skipped = stats->non_finite > 0;
  }
  if (!result.skipped) {
    const absl::StatusOr<GradientStats> stats =
        backend_->ApplyStep(gradient, Resolve(config_.optimizer, request, steps + 1));
    if (!stats.ok()) return stats.status();
    result.stats = *stats;
  }
  backend_->Reset(gradient);
  return result;
}

// All at once for everybody who looks: the new version, the record and the next window, or nothing.
std::vector<std::function<void()>> Head::EndStepLocked(absl::StatusOr<StepResult>& answer) {
  const StepRequest request = *std::exchange(window_.step, std::nullopt);
  if (!answer.ok()) {
    window_.state = WindowState::kOpen;
    return TakeWaitersLocked();
  }
  Counters& counters = *environment_.counters;
  if (answer->skipped) {
    ++counters.steps_skipped;
  } else {
    ++weight_version_;
    ++optimizer_steps_;
    ++counters.steps_applied;
    ++counters.weight_versions;
  }
  counters.step_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - window_.step_begun));
  answer->weight_version = weight_version_;
  answer->step = optimizer_steps_;
  answer->window_tokens = window_.tokens;
  answer->generation = window_.generation + 1;
  window_.last_step = {window_.generation, std::exchange(window_.marks, {}), request, *answer};
  return BeginWindowLocked();
}

void Head::ReadStats(uint64_t generation, std::vector<SessionMarks> marks, double gradient_scale,
                     std::function<void(absl::StatusOr<WindowStats>)> done) {
  marks = Canonical(std::move(marks));
  absl::Status refused;
  if (!IsScale(gradient_scale)) {
    refused = MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, "gradient_scale",
                        absl::StrCat("gradient_scale is ", gradient_scale, "; it must be finite in fp32"));
  } else {
    const std::lock_guard lock(mutex_);
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
  if (!ended_.ok()) return ended_;
  if (frozen()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "head",
                     absl::StrCat("head ", config_.name, " is frozen: it has no gradient"));
  }
  if (absl::Status place = CheckGenerationLocked(generation); !place.ok()) return place;
  // What a flush holds it has told of.
  if (window_.state == WindowState::kFrozen) return CheckOpenLocked();
  return marks.empty() ? absl::OkStatus() : ledger_.Match(marks);
}

absl::StatusOr<Head::WindowStats> Head::StatsNow(uint64_t generation, const std::vector<SessionMarks>& marks,
                                                 double gradient_scale) {
  WindowStats stats;
  const Gradient* gradient = nullptr;
  {
    const std::lock_guard lock(mutex_);
    // Much may have happened while it waited.
    if (absl::Status status = CheckStatsLocked(generation, marks); !status.ok()) return status;
    gradient = window_gradient_;
    stats.window_tokens = window_.tokens;
  }
  absl::StatusOr<GradientStats> of_gradient = SummarizeWindow(gradient, gradient_scale);
  if (!of_gradient.ok()) {
    EndByFailure(of_gradient.status());
    return of_gradient.status();
  }
  stats.gradient = *of_gradient;
  CountGradient(stats.gradient.norm, stats.gradient.non_finite);
  return stats;
}

// Gradients of sessions stay apart until the window ends, so their sum is made here, piece by piece.
absl::StatusOr<GradientStats> Head::SummarizeWindow(const Gradient* of, double gradient_scale) {
  if (DeterministicInOrder().empty()) return backend_->Summarize(of, gradient_scale);
  const ScaledGradient gradient{of, static_cast<float>(gradient_scale)};
  GradientStats stats;
  GradientSummarizer summarizer;
  const auto add = [&](std::span<const float> rows) {
    summarizer.Add(rows);
    stats.largest = LargestFinite(rows, stats.largest);
  };
  if (absl::Status status = ForEachPiece(gradient, add); !status.ok()) return status;
  GradientSummary summary = summarizer.Finish();
  stats.norm = summary.norm;
  stats.non_finite = summary.non_finite;
  if (!config_.bias) return stats;
  std::vector<float> bias(static_cast<size_t>(config_.vocab_size));
  if (absl::Status status = ReadScaledBias(gradient, 0, config_.vocab_size, bias.data()); !status.ok()) {
    return status;
  }
  GradientSummarizer of_bias;
  of_bias.Add(bias);
  summary = of_bias.Finish();
  stats.bias_norm = summary.norm;
  stats.non_finite += summary.non_finite;
  stats.largest = LargestFinite(bias, stats.largest);
  return stats;
}

}  // namespace lossd::engine
