// Heads that are put aside in the host's memory, and come back when somebody wants them.
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/engine.h"
#include "server/engine/parked_head.h"

namespace lossd::engine {
namespace {

// For so long a head that had no room on the device is not tried again, unless there is more of it: who asked
// for it and waits is told.
constexpr absl::Duration kFailureHolds = absl::Seconds(10);
// For so long a head that has come back is not parked again before who wanted it has found it: he may ask but
// once a second.
constexpr absl::Duration kAwaited = absl::Seconds(10);

}  // namespace

absl::Status Engine::CheckParks() const {
  if (options_.place.shared()) {
    return MakeError(absl::StatusCode::kUnimplemented, RejectReason::kConflict, "name",
                     "heads over replicas cannot be parked");
  }
  if (options_.parking_bytes > 0) return CheckServing();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, RejectReason::kOutOfMemory, "name",
      "this server has no memory of the host for parked heads; start it with --parking_bytes, as "
      "--parking_bytes=32GiB");
}

absl::Status Engine::CheckNotAwaited(const std::string& name) const {
  const MutexLock lock(mutex_);
  const auto it = awaited_.find(name);
  if (it == awaited_.end() || it->second < MonotonicNow()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "name",
                   absl::StrCat("head ", name,
                                " has just come back for somebody who asks for it again in a moment; park it "
                                "when it is not in use"));
}

absl::StatusOr<HeadInfo> Engine::ParkHead(const std::string& name) {
  if (absl::Status can = CheckParks(); !can.ok()) return can;
  const MutexLock saving(checkpoint_mutex_);  // it is neither saved nor restored meanwhile
  const MutexLock creating(create_mutex_);
  if (std::optional<HeadInfo> there = FindParked(name); there.has_value()) return *std::move(there);
  const absl::StatusOr<std::shared_ptr<Head>> head = FindHere(name);
  if (!head.ok()) return head.status();
  if (absl::Status free = CheckNotAwaited(name); !free.ok()) return free;
  std::shared_ptr<ParkedHead> parked;
  const auto place = [this, &head, &parked](const FileSizes& files) -> absl::StatusOr<StateSink*> {
    auto room = ParkedHead::Create(parking_.get(), (*head)->config(), files);
    if (!room.ok()) return room.status();
    parked = *std::move(room);
    return parked.get();
  };
  std::promise<absl::StatusOr<HeadCheckpoint>> written;
  (*head)->Park(place, ComingBack(name), [&written](absl::StatusOr<HeadCheckpoint> checkpoint) {
    written.set_value(std::move(checkpoint));
  });
  absl::StatusOr<HeadCheckpoint> checkpoint = written.get_future().get();
  if (!checkpoint.ok()) return checkpoint.status();
  parked->Complete(*std::move(checkpoint));
  {
    const MutexLock lock(mutex_);
    heads_.erase(name);
    parked_.emplace(name, ParkedEntry{.head = parked, .checkpoint_steps = (*head)->checkpoint_steps()});
  }
  ReleaseEnded(**head);
  ForgetFailures();
  ++counters_.heads_parked;
  return parked->Info(options_.chunk_limits);
}

absl::Status Engine::BringBack(const std::string& name) {
  std::shared_ptr<const ParkedHead> parked;
  {
    const MutexLock lock(mutex_);
    const auto it = parked_.find(name);
    if (it == parked_.end()) return absl::OkStatus();
    parked = it->second.head;
  }
  const absl::StatusOr<std::shared_ptr<Head>> head = Revive(std::move(parked));
  std::vector<Student> waiting;
  {
    const MutexLock lock(mutex_);
    ParkedEntry& entry = parked_.at(name);
    waiting.swap(entry.waiting);
    if (head.ok()) {
      ++counters_.heads_brought_back;  // before anybody can find the head
      (*head)->NoteCheckpoint(entry.checkpoint_steps);
      heads_.emplace(name, *head);
      if (entry.coming_back) awaited_[name] = MonotonicNow() + kAwaited;
      parked_.erase(name);
    } else {
      entry.failure = head.status();
      entry.failed_at = MonotonicNow();
      entry.coming_back = false;
    }
  }
  ResumeAside(std::move(waiting));
  return head.status();
}

// Not by who has locks.
void Engine::ResumeAside(std::vector<Student> students) {
  for (Student& student : students) {
    returns_.Run([student = std::move(student)] { student.Resume(); });
  }
}

absl::StatusOr<std::shared_ptr<Head>> Engine::Revive(std::shared_ptr<const ParkedHead> parked) {
  const HeadCheckpoint& state = parked->checkpoint();
  if (absl::Status can = CheckCreated(state.config); !can.ok()) return can;
  absl::StatusOr<std::shared_ptr<Head>> head = MakeHead(state.config);
  if (!head.ok()) return head;
  std::promise<absl::Status> restored;
  (*head)->Restore(Head::RestoreAs::kDrained, {state.restores, state.weight_version}, std::move(parked), {},
                   [&restored](const absl::StatusOr<FileKeys>& keys) { restored.set_value(keys.status()); });
  absl::Status back = restored.get_future().get();
  if (back.ok()) return head;
  (*head)->MarkDeleted(back, DiscardGradient::kYes).IgnoreError();
  ReleaseEnded(**head);
  return back;
}

absl::StatusOr<std::shared_ptr<Head>> Engine::FindHeadAndWait(const std::string& name) {
  {
    // Most heads are not parked, and another one may be long in the making.
    const MutexLock lock(mutex_);
    if (!parked_.contains(name)) return FindHereLocked(name);
  }
  const MutexLock creating(create_mutex_);
  if (absl::Status back = BringBack(name); !back.ok()) return back;
  return FindHere(name);
}

absl::Status Engine::BeginReturnLocked(const std::string& name, ParkedEntry* entry) {
  if (absl::Status serving = CheckServing(); !serving.ok()) return serving;
  if (entry->coming_back) return absl::OkStatus();
  if (!entry->failure.ok() && MonotonicNow() - entry->failed_at < kFailureHolds) return entry->failure;
  entry->coming_back = true;
  returns_.Run([this, name] { FindHeadAndWait(name).IgnoreError(); });  // told to who asks again
  return absl::OkStatus();
}

bool Engine::AwaitHead(const std::string& name, const Student& student) {
  std::shared_ptr<Head> here;
  {
    const MutexLock lock(mutex_);
    const auto it = parked_.find(name);
    if (it != parked_.end()) {
      if (!BeginReturnLocked(name, &it->second).ok()) return false;
      it->second.waiting.push_back(student);
      return true;
    }
    if (const auto found = heads_.find(name); found != heads_.end()) here = found->second;
  }
  return here != nullptr && here->AwaitLessons(student);
}

// There is more room than there was.
void Engine::ForgetFailures() {
  const MutexLock lock(mutex_);
  for (auto& [name, entry] : parked_) entry.failure = absl::OkStatus();
}

std::optional<HeadInfo> Engine::FindParked(const std::string& name) const {
  const MutexLock lock(mutex_);
  const auto it = parked_.find(name);
  if (it == parked_.end()) return std::nullopt;
  return it->second.head->Info(options_.chunk_limits);
}

std::vector<HeadInfo> Engine::ParkedHeads() const {
  std::vector<HeadInfo> heads;
  for (const auto& [name, head] : AllHeads().parked) heads.push_back(head->Info(options_.chunk_limits));
  return heads;
}

Engine::HeadList Engine::AllHeads() const {
  const MutexLock lock(mutex_);
  HeadList all;
  for (const auto& [name, head] : heads_) all.here.push_back(head);
  for (const auto& [name, entry] : parked_) all.parked.emplace(name, entry.head);
  return all;
}

// Its memory is free again when this returns.
void Engine::ReleaseEnded(Head& head) {
  std::promise<void> released;
  head.Shutdown([&released] { released.set_value(); });
  released.get_future().wait();
}

absl::StatusOr<bool> Engine::DeleteParked(const std::string& name, DiscardGradient discard) {
  const MutexLock creating(create_mutex_);  // it does not come back meanwhile
  const std::optional<HeadInfo> parked = FindParked(name);
  if (!parked.has_value()) return false;
  if (discard == DiscardGradient::kNo && parked->window_tokens > 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "discard_gradient",
                     absl::StrCat("the window of head ", name, ", which is parked, holds gradients of ",
                                  parked->window_tokens, " tokens; flush it, or set discard_gradient"));
  }
  // Its checkpoints stay, but no start brings it back. First: if this fails, nothing has changed.
  if (options_.checkpoints != nullptr) {
    if (absl::Status marked = options_.checkpoints->MarkDeleted(name); !marked.ok()) return marked;
  }
  ParkedEntry gone;
  {
    const MutexLock lock(mutex_);
    gone = std::move(parked_.at(name));
    parked_.erase(name);
  }
  ResumeAside(std::move(gone.waiting));
  ForgetFailures();
  return true;
}

// At a drain, where nothing comes back any more.
absl::StatusOr<SavedCheckpoint> Engine::SaveParked(const ParkedHead& parked) {
  const absl::Time begun = absl::Now();
  return Counted(begun, SaveParkedUncounted(parked));
}

absl::StatusOr<SavedCheckpoint> Engine::SaveParkedUncounted(const ParkedHead& parked) {
  CheckpointStore& store = *options_.checkpoints;
  absl::StatusOr<std::unique_ptr<CheckpointWriter>> writer =
      store.Begin(parked.checkpoint().config.name, kDrainTag);
  if (!writer.ok()) return writer.status();
  if (absl::Status written = parked.WriteTo(writer->get()); !written.ok()) return written;
  const absl::StatusOr<CheckpointInfo> info = store.Commit(**writer, parked.checkpoint());
  if (!info.ok()) return info.status();
  return SavedCheckpoint{*info, (*writer)->bytes_written()};
}

// A head that was parked when the last server was drained. False if there is no room for it here: it is then
// restored as any other.
absl::StatusOr<bool> Engine::ParkDrained(CheckpointReader& reader) {
  if (absl::Status verified = reader.Verify(); !verified.ok()) return verified;
  const HeadCheckpoint& state = reader.checkpoint();
  if (absl::Status can = CheckCreated(state.config); !can.ok()) return can;
  const auto room =
      ParkedHead::Create(parking_.get(), state.config, SizesOf(state.config, state.tensors, state.gradients));
  if (!room.ok()) return false;
  if (absl::Status copied = (*room)->CopyFrom(reader); !copied.ok()) return copied;
  const MutexLock lock(mutex_);
  parked_.emplace(state.config.name, ParkedEntry{.head = *room, .checkpoint_steps = state.optimizer_steps});
  return true;
}

}  // namespace lossd::engine
