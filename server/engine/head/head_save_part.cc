// One replica's part in saving all of them: docs/decisions/0022-replicas.md.
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/slices.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

WindowPlace Head::PlaceLocked() const {
  return {.generation = window_.generation(),
          .weight_version = weights_.version(),
          .optimizer_steps = weights_.optimizer_steps(),
          .restores = history_.restores(),
          .flush_id = window_.flush_id()};
}

absl::Status Head::CheckEpochLocked(uint64_t epoch) const {
  if (epoch == joint_.epoch) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("the replicas of head ", config_.name, " have parted meanwhile; try again"));
}

std::vector<std::vector<kernels::RowSpan>> Head::SliceRows() const {
  const kernels::SliceLayout layout(config_.vocab_size, environment_.place.replicas);
  std::vector<std::vector<kernels::RowSpan>> slices;
  const MutexLock lock(mutex_);
  // The backend goes only after that.
  if (!lifecycle_.alive().ok()) return slices;
  for (int32_t slice = 0; slice < layout.replicas(); ++slice) {
    slices.push_back(backend_address_->SliceRows(layout, slice));
  }
  return slices;
}

void Head::LeaveEpoch() {
  {
    const MutexLock lock(mutex_);
    ++joint_.epoch;
  }
  ReleaseCaptured();
  CancelRestorePart();
  lessons_->EndWaits();
}

absl::StatusOr<Head::BegunSave> Head::BeginSave() {
  const MutexLock lock(mutex_);
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (window_.state() == WindowState::kSealing || joint_.saving) {
    return MakeError(absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
                     absl::StrCat("another call ends the window of head ", config_.name,
                                  ", or saves it; save it when that is answered"));
  }
  if (absl::Status none = CheckNothingPreparedLocked(); !none.ok()) return none;
  joint_.saving = true;
  return BegunSave{PlaceLocked(), KeysLocked()};
}

void Head::EndSave() {
  std::optional<WindowEnd> waiting;
  {
    const MutexLock lock(mutex_);
    joint_.saving = false;
    waiting = std::exchange(joint_.waiting_end, std::nullopt);
  }
  if (waiting.has_value()) environment_.end_together(shared_from_this(), *std::move(waiting));
}

void Head::EndTogether(WindowEnd end) {
  {
    const MutexLock lock(mutex_);
    if (joint_.saving) {
      joint_.waiting_end = std::move(end);
      return;
    }
  }
  environment_.end_together(shared_from_this(), std::move(end));
}

void Head::CapturePart(const WindowPlace& place, std::vector<SessionMarks> named, SavedCallback done) {
  uint64_t epoch = 0;
  {
    const MutexLock lock(mutex_);
    epoch = joint_.epoch;
  }
  PostSettled([self = shared_from_this(), epoch, place, named = std::move(named), done = std::move(done)] {
    done(self->CapturePartNow(epoch, place, named));
  });
}

absl::StatusOr<HeadCheckpoint> Head::CapturePartNow(uint64_t epoch, const WindowPlace& place,
                                                    const std::vector<SessionMarks>& named) {
  const MutexLock lock(mutex_);
  if (absl::Status same = CheckEpochLocked(epoch); !same.ok()) return same;
  // A call that ends the window may have come since BeginSave: it waits, and the window is what it was.
  const bool waits = joint_.saving && window_.state() == WindowState::kSealing;
  if (!waits && window_.state() == WindowState::kSealing) return window_.CheckOpen();
  if (PlaceLocked() != place) {
    return absl::FailedPreconditionError(absl::StrCat(
        "head ", config_.name, " is in window ", window_.generation(), " with weights of version ",
        weights_.version(), ", and not where replica ", ReplicaPlace::kCoordinator, " is"));
  }
  absl::StatusOr<CapturedHead> captured = CaptureLocked(SaveAs::kTagged, named);
  if (!captured.ok()) return captured.status();
  captured->state.window.marks.clear();
  for (const GradientFile& file : captured->gradients) captured->state.gradients.push_back(file.name);
  joint_.captured = true;
  // The sum is to be of this very moment.
  environment_.scheduler->Pause(this);
  return std::move(captured->state);
}

void Head::SumCapturedPart(std::shared_ptr<const ReplicaCommunicators> replicas,
                           std::function<void(absl::Status)> done) {
  PostExchange([self = shared_from_this(), replicas = std::move(replicas), done = std::move(done)] {
    done(self->SumCapturedNow(*replicas));
  });
}

absl::Status Head::SumCapturedNow(const ReplicaCommunicators& replicas) {
  WindowGradient gradient;
  {
    const MutexLock lock(mutex_);
    if (!lifecycle_.alive().ok()) return lifecycle_.alive();
    if (!joint_.captured) return absl::UnavailableError("the window to be summed was let go of");
    gradient = WindowGradientLocked();
  }
  absl::Status summed = backend_->SumSlices(gradient.window, replicas);
  ReleaseCaptured();
  if (!summed.ok() && !absl::IsUnavailable(summed)) OnDeviceFailure(summed);
  return summed;
}

void Head::ReleaseCaptured() {
  const MutexLock lock(mutex_);
  if (std::exchange(joint_.captured, false)) environment_.scheduler->Resume(this);
}

}  // namespace lossd::engine
