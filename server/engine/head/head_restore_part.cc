// One replica's part in a restore of all of them: docs/decisions/0022-replicas.md.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/optimizer_state.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

// The head takes nothing from here on. So its line, once it is settled, holds no chunk, whose lease of a
// teacher would last as long as this restore, and no end of its window, which would pause the line first.
void Head::BeginRestorePart(std::function<void(absl::StatusOr<RestoringPart>)> done) {
  uint64_t epoch = 0;
  bool paused = false;
  absl::Status begun;
  {
    const MutexLock lock(mutex_);
    epoch = joint_.epoch;
    paused = joint_.restoring != RestorePhase::kNone;
    begun = BeginRestorePartLocked();
  }
  if (!begun.ok()) return done(std::move(begun));
  auto begin = [self = shared_from_this(), epoch, done = std::move(done)] {
    self->BeginRestorePartNow(epoch, done);
  };
  // Nothing of a head whose restore broke off is under way.
  if (paused) return PostExchange(std::move(begin));
  PostSettled(std::move(begin));
}

absl::Status Head::BeginRestorePartLocked() {
  if (!lifecycle_.admits().ok()) return lifecycle_.admits();
  if (joint_.restoring == RestorePhase::kNone) {
    if (window_.state() == WindowState::kSealing || window_.ends_flush() || joint_.saving) {
      return MakeError(absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
                       absl::StrCat("a call that ends the window of head ", config_.name,
                                    " is under way; restore it when that is answered"));
    }
    if (absl::Status none = CheckNothingPreparedLocked(); !none.ok()) return none;
    if (absl::Status unused = CheckNotLentLocked(); !unused.ok()) return unused;
    joint_.restoring = RestorePhase::kBegun;
    lifecycle_.BeginRestore(MakeError(absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
                                      absl::StrCat("head ", config_.name, " is being restored")));
  } else if (joint_.restoring == RestorePhase::kReady) {
    joint_.restoring = RestorePhase::kOverwritten;
    joint_.restored.reset();
  }
  return absl::OkStatus();
}

// Pauses the head once no chunk of another head uses its weights; BeginLesson refuses new ones.
void Head::BeginRestorePartNow(uint64_t epoch,
                               const std::function<void(absl::StatusOr<RestoringPart>)>& done) {
  absl::StatusOr<RestoringPart> begun;
  {
    const MutexLock lock(mutex_);
    absl::Status goes_on = CheckBegunLocked(epoch);
    if (goes_on.ok() && lessons_->taken() > 0) {
      return lessons_->WhenNone([self = shared_from_this(), epoch, done] {
        self->PostExchange([self, epoch, done] { self->BeginRestorePartNow(epoch, done); });
      });
    }
    if (goes_on.ok()) {
      environment_.scheduler->Pause(this);
      begun = RestoringPart{environment_.incarnation, weights_.version()};
    } else {
      begun = std::move(goes_on);
    }
  }
  done(std::move(begun));
}

absl::Status Head::CheckBegunLocked(uint64_t epoch) const {
  if (absl::Status same = CheckEpochLocked(epoch); !same.ok()) return same;
  if (!lifecycle_.admits().ok()) return lifecycle_.admits();
  return joint_.restoring == RestorePhase::kNone ? RestoreBrokeOff() : absl::OkStatus();
}

absl::Status Head::RestoreBrokeOff() const {
  return absl::UnavailableError(absl::StrCat("the replicas of head ", config_.name,
                                             " have parted, and its restore has come to nothing; try again"));
}

absl::Status Head::CheckRestorable(const HeadCheckpoint& state) const {
  const MutexLock lock(mutex_);
  for (const SessionCheckpoint& session : state.sessions) {
    if (!session.tiles.has_value() || session.tiles->taken.empty()) continue;
    return MakeError(
        absl::StatusCode::kFailedPrecondition, RejectReason::kCheckpoint, "head",
        absl::StrCat(
            "the checkpoint cannot be restored to head ", config_.name,
            ", which is over replicas: deterministic sessions had added to its window; restore it to "
            "one server, end the window there, and save it again"));
  }
  return CheckSameStateLocked(state, StateTensorsOf(config_));
}

absl::Status Head::BeginOverwriting() {
  const MutexLock lock(mutex_);
  if (joint_.restoring == RestorePhase::kNone) return RestoreBrokeOff();
  joint_.restoring = RestorePhase::kOverwritten;
  joint_.restored.reset();
  return absl::OkStatus();
}

void Head::FinishRestorePart(const RestoredPart& part, std::shared_ptr<const StateSource> source,
                             std::shared_ptr<const ReplicaCommunicators> replicas,
                             std::function<void(absl::Status)> done) {
  absl::StatusOr<std::vector<SessionMemory>> memory = MemoryForRestored(part.state);
  if (!memory.ok()) return done(memory.status());
  auto taken = std::make_shared<std::vector<SessionMemory>>(*std::move(memory));
  PostExchange([self = shared_from_this(), part, source = std::move(source), replicas = std::move(replicas),
                taken, done = std::move(done)] {
    done(self->FinishRestoreNow(part, *source, *replicas, std::move(*taken)));
  });
}

// Takes memory for the checkpoint's deterministic sessions, less what the head's sessions and an earlier
// restore have.
absl::StatusOr<std::vector<SessionMemory>> Head::MemoryForRestored(const HeadCheckpoint& state) {
  int64_t missing = std::count_if(state.sessions.begin(), state.sessions.end(),
                                  [](const SessionCheckpoint& entry) { return entry.tiles.has_value(); });
  {
    const MutexLock lock(mutex_);
    missing -= sessions_.memories() + std::ssize(restored_sessions_);
  }
  std::vector<SessionMemory> memory;
  for (; missing > 0; --missing) {
    absl::StatusOr<SessionMemory> taken = environment_.take_session_memory(config_);
    if (!taken.ok()) return taken.status();
    memory.push_back(*std::move(taken));
  }
  return memory;
}

absl::Status Head::FinishRestoreNow(const RestoredPart& part, const StateSource& source,
                                    const ReplicaCommunicators& replicas, std::vector<SessionMemory> memory) {
  if (absl::Status alive = CheckAlive(); !alive.ok()) return alive;
  if (absl::Status begun = BeginOverwriting(); !begun.ok()) return begun;
  HeadStateReader reader(&config_, backend_.get(), &source);
  absl::Status status = RestoreSessionsOfPart(reader, part.state, std::move(memory));
  if (status.ok()) status = RestoreWindow(RestoreAs::kTagged, reader);
  ++gradient_changes_;
  if (!reader.device().ok()) OnDeviceFailure(reader.device());
  if (status.ok() && !part.state.tensors.empty()) {
    status = backend_->RestoreState();
    if (status.ok() && !frozen()) status = backend_->GatherSlices(replicas);
    if (!status.ok() && !absl::IsUnavailable(status)) OnDeviceFailure(status);
  }
  if (!status.ok()) return status;
  const MutexLock lock(mutex_);
  joint_.restored = part;
  joint_.restoring = RestorePhase::kReady;
  return absl::OkStatus();
}

absl::Status Head::RestoreSessionsOfPart(HeadStateReader& reader, const HeadCheckpoint& part,
                                         std::vector<SessionMemory> memory) {
  {
    const MutexLock lock(mutex_);
    sessions_.TakeMemory(&memory);
    for (auto& [id, session] : std::exchange(restored_sessions_, {})) {
      memory.push_back(std::move(session->memory));
    }
  }
  std::erase_if(memory, [](const SessionMemory& one) { return one.gradient == nullptr; });
  MoreMemory more(memory.size());
  absl::StatusOr<SessionTable::DeterministicSessions> sessions =
      RestoreSessions(reader, part, std::move(memory), std::move(more));
  if (!sessions.ok()) return sessions.status();
  const MutexLock lock(mutex_);
  restored_sessions_ = *std::move(sessions);
  return absl::OkStatus();
}

FileKeys Head::InstallRestoredPart() {
  std::optional<RestoredPart> part;
  SessionTable::DeterministicSessions sessions;
  {
    const MutexLock lock(mutex_);
    if (joint_.restoring != RestorePhase::kReady) return {};
    part = joint_.restored;
    sessions.swap(restored_sessions_);
  }
  Install(RestoreAs::kTagged, part->numbers, part->state, std::move(sessions));
  FileKeys keys = KeysOf(part->state.tensors);  // before anything can change them
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    joint_.restoring = RestorePhase::kNone;
    joint_.restored.reset();
    environment_.scheduler->Resume(this);
    waiting = TakeWaitingLocked();
  }
  Call(waiting);
  return keys;
}

void Head::CancelRestorePart() {
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    if (joint_.restoring != RestorePhase::kBegun) return;
    joint_.restoring = RestorePhase::kNone;
    lifecycle_.EndRestore();
    environment_.scheduler->Resume(this);
    waiting = TakeWaitingLocked();
  }
  Call(waiting);
}

}  // namespace lossd::engine
