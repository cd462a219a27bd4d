// What a head's window is like while it is open.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

void Head::ReadStats(uint64_t generation, std::vector<SessionMarks> marks, double gradient_scale,
                     const StatsCallback& done) {
  marks = Canonical(std::move(marks));
  absl::Status refused;
  std::optional<WindowEnd> together;
  if (!IsScale(gradient_scale)) {
    refused = Invalid(RejectReason::kOption, "gradient_scale",
                      absl::StrCat("gradient_scale is ", gradient_scale, "; it must be finite in fp32"));
  } else {
    const MutexLock lock(mutex_);
    refused = CheckStatsLocked(generation, marks);
    if (refused.ok() && environment_.place.shared()) {
      together = BeginLookLocked(generation, marks, gradient_scale, done);
    } else if (refused.ok()) {
      PostStatsLocked(generation, std::move(marks), gradient_scale, done);
    }
  }
  if (!refused.ok()) done(refused);
  if (together.has_value()) EndTogether(*std::move(together));
}

void Head::PostStatsLocked(uint64_t generation, std::vector<SessionMarks> marks, double gradient_scale,
                           const StatsCallback& done) {
  auto task = [self = shared_from_this(), generation, marks, gradient_scale, done] {
    done(self->StatsNow(generation, marks, gradient_scale));
  };
  if (marks.empty()) {
    environment_.scheduler->Post(this, std::move(task));
  } else {
    PostLastLocked({.marks = std::move(marks)}, std::move(task));
  }
}

absl::Status Head::CheckStatsLocked(uint64_t generation, const std::vector<SessionMarks>& marks) const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  if (absl::Status right = CheckEndsWindows(); !right.ok()) return right;
  const bool seals = environment_.place.shared();
  if (seals && !lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (frozen()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "head",
                     absl::StrCat("head ", config_.name, " is frozen: it has no gradient"));
  }
  if (absl::Status place = CheckEndPlaceLocked(generation, marks); !place.ok()) return place;
  // BeginFlush returned the statistics of a sealed window already.
  if (window_.state() == WindowState::kSealed) return window_.CheckOpen();
  std::vector<SessionMarks> own;
  return marks.empty() ? absl::OkStatus() : sessions_.Match(*OwnMarks(&marks, &own));
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

// Statistics of the windows of all replicas

std::optional<WindowEnd> Head::BeginLookLocked(uint64_t generation, const std::vector<SessionMarks>& marks,
                                               double gradient_scale, StatsCallback done) {
  if (window_.state() != WindowState::kOpen) {
    WaitBehindLocked(done, [generation, marks, gradient_scale](Head& head, const StatsCallback& again) {
      head.ReadStats(generation, marks, gradient_scale, again);
    });
    return std::nullopt;
  }
  window_.BeginLook(marks, {gradient_scale}, std::move(done));
  return EndingLocked();
}

void Head::EndLook(const WindowStats& stats, uint64_t ending) {
  std::vector<StatsCallback> waiters;
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    if (!window_.looking() || window_.ending() != ending) return;
    waiters = window_.EndLook();
    waiting = TakeWaitingLocked();
  }
  CountGradient(stats.gradient.norm, stats.gradient.non_finite);
  for (const StatsCallback& waiter : waiters) waiter(stats);
  Call(waiting);
}

}  // namespace lossd::engine
