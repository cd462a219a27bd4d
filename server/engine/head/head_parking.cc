// A head that leaves the device, and nothing of it is lost.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

void Head::Park(ParkingPlace place, const absl::Status& parked, SavedCallback done) {
  absl::Status unused;
  {
    const MutexLock lock(mutex_);
    // What follows closes tiles: not for a head that is in use anyway.
    unused = CheckUnusedLocked();
    if (unused.ok()) {
      // What its teaching waits for in other heads is done with the weights that there are.
      PostLastLocked({.closes = LastTask::Closes::kNone, .changes_weights = true},
                     [self = shared_from_this(), place = std::move(place), parked, done = std::move(done)] {
                       self->ParkNow(place, parked, done);
                     });
      return;
    }
  }
  done(unused);
}

void Head::ParkNow(const ParkingPlace& place, const absl::Status& parked, const SavedCallback& done) {
  absl::StatusOr<CapturedHead> captured = CapturedHead{};
  bool settled = false;
  {
    const MutexLock lock(mutex_);
    settled = window_work_ == 0;
    if (settled) captured = CaptureUnusedLocked();
  }
  if (!settled) return Park(place, parked, done);  // behind the work that came while this waited
  if (!captured.ok()) return done(captured.status());
  std::vector<StateTensor> tensors;
  if (captured->state.weight_version > 0) tensors = backend_->StateTensors();
  std::vector<std::string> gradients;
  for (const GradientFile& file : captured->gradients) gradients.push_back(file.name);
  const absl::StatusOr<StateSink*> sink = place(SizesOf(config_, tensors, gradients));
  if (!sink.ok()) return done(sink.status());
  {
    const MutexLock lock(mutex_);
    // Somebody may have come meanwhile. From here on nobody does, and what was posted before is turned away.
    captured = CaptureUnusedLocked();
    if (captured.ok()) lifecycle_.End(parked);
  }
  if (!captured.ok()) return done(captured.status());
  HeadStateWriter writer(&config_, backend_.get(), *sink);
  const absl::Status written = writer.Write(&*captured);
  if (!written.ok()) {
    OnDeviceFailure(written);  // the room was there
    return done(written);
  }
  done(std::move(captured->state));
}

absl::Status Head::CheckUnusedLocked() const {
  if (!lifecycle_.admits().ok()) return lifecycle_.admits();
  const auto in_use = [this](absl::StatusCode code, absl::string_view why) {
    return MakeError(code, RejectReason::kConflict, "name",
                     absl::StrCat("head ", config_.name, " is in use, and cannot be parked: ", why));
  };
  if (const int64_t open = sessions_.open(); open > 0) {
    return in_use(absl::StatusCode::kFailedPrecondition,
                  absl::StrCat("it has ", open, open == 1 ? " open session" : " open sessions",
                               "; close them, or wait until their leases end (--session_lease)"));
  }
  if (const int64_t taught = lessons_->taken(); taught > 0) {
    return in_use(absl::StatusCode::kFailedPrecondition,
                  absl::StrCat("it teaches ", taught, taught == 1 ? " chunk" : " chunks",
                               " of sessions that are under way; try again when they are done"));
  }
  if (window_.state() == WindowState::kSealing) {
    return in_use(absl::StatusCode::kUnavailable, "a call that ends its window is under way; try again");
  }
  // One that nobody has written to is given up.
  if (weights_.staged_rows() > 0 || !weights_.committing().empty()) return weights_.CheckNoWrite();
  if (sessions_.deterministic_count() > 0) {
    return in_use(absl::StatusCode::kFailedPrecondition,
                  "its window has gradients of deterministic sessions; end it first, by a step or a flush");
  }
  return absl::OkStatus();
}

absl::StatusOr<CapturedHead> Head::CaptureUnusedLocked() const {
  if (absl::Status unused = CheckUnusedLocked(); !unused.ok()) return unused;
  return CaptureLocked(SaveAs::kTagged, {});
}

}  // namespace lossd::engine
