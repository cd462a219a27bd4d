// Checkpoints of a head: captured between two batches, and put in the place of everything it was.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

absl::Status Refused(absl::StatusCode code, absl::string_view message) {
  return MakeError(code, RejectReason::kCheckpoint, "head", message);
}

absl::Status NotRestorable(const HeadConfig& head, absl::string_view why) {
  return Refused(absl::StatusCode::kFailedPrecondition,
                 absl::StrCat("the checkpoint cannot be restored to head ", head.name, ": ", why));
}

// Nobody is left who could end the flush that held a tagged checkpoint's window: it is whole again, as after
// an abort.
bool Reopens(Head::RestoreAs as, const HeadCheckpoint& state) {
  return as == Head::RestoreAs::kTagged && state.window.state == WindowState::kSealed;
}

Window Reopened(Window window) {
  window.state = WindowState::kOpen;
  window.tokens += std::exchange(window.next_tokens, 0);
  return window;
}

}  // namespace

uint64_t Head::restores() const {
  const MutexLock lock(mutex_);
  return history_.restores();
}

// Saving

void Head::Save(SaveAs as, std::vector<SessionMarks> named, StateSink* sink, SavedCallback done) {
  const MutexLock lock(mutex_);
  // What tiles hold stays there, so that the sum is that of an undisturbed run. Not so soft targets: when
  // this head is restored, their teacher may have other weights, or be gone.
  PostLastLocked({.closes = LastTask::Closes::kSoftTargets},
                 [self = shared_from_this(), as, named = std::move(named), sink, done = std::move(done)] {
                   self->SaveNow(as, named, sink, done);
                 });
}

void Head::SaveNow(SaveAs as, std::vector<SessionMarks> named, StateSink* sink, SavedCallback done) {
  absl::StatusOr<CapturedHead> captured = CapturedHead{};
  bool settled = false;
  {
    const MutexLock lock(mutex_);
    // With the same lock as what follows: an abort between the two would have the window say more than its
    // gradient holds.
    settled = window_work_ == 0;
    if (settled) captured = CaptureLocked(as, named);
  }
  // Behind the work that came while this waited.
  if (!settled) return Save(as, std::move(named), sink, std::move(done));
  if (!captured.ok()) return done(captured.status());
  HeadStateWriter writer(&config_, backend_.get(), sink);
  const absl::Status written = writer.Write(&*captured);
  if (!writer.device().ok()) OnDeviceFailure(writer.device());
  if (!written.ok()) return done(written);
  done(std::move(captured->state));
}

absl::StatusOr<CapturedHead> Head::CaptureLocked(SaveAs as, const std::vector<SessionMarks>& named) const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  if (window_.state() == WindowState::kSealed && as == SaveAs::kTagged) {
    return Refused(absl::StatusCode::kFailedPrecondition,
                   absl::StrCat("the window of head ", config_.name, " is sealed by flush ",
                                window_.flush_id(), ": commit or abort it first"));
  }
  CapturedHead captured;
  HeadCheckpoint& state = captured.state;
  state.config = config_;
  state.incarnation = environment_.incarnation;
  state.restores = history_.restores();
  state.ancestors = history_.ancestors();
  WeightStore::State weights = weights_.state();
  state.weight_version = weights.version;
  state.optimizer_steps = weights.optimizer_steps;
  state.last_committed_write = std::move(weights.last_committed_write);
  state.last_committed_version = weights.last_committed_version;
  state.window = window_.Capture();
  if (absl::Status sessions = sessions_.Capture(&state); !sessions.ok()) return sessions;
  if (absl::Status has = CheckCapturedLocked(named, state); !has.ok()) return has;
  if (!frozen()) captured.gradients = GradientFilesLocked(state);
  captured.keys = KeysLocked();
  return captured;
}

// Compared is what was captured: chunks that came since the caller looked wait, and are withdrawn in it.
absl::Status Head::CheckCapturedLocked(const std::vector<SessionMarks>& named,
                                       const HeadCheckpoint& state) const {
  if (named.empty()) return absl::OkStatus();
  AccumulationLedger::Sessions captured;
  for (const SessionCheckpoint& entry : state.sessions) captured.emplace(entry.id, entry.session);
  std::vector<SessionMarks> own;
  std::vector<SessionMarks> here;
  for (const SessionMarks& session : *OwnMarks(&named, &own)) {
    const bool lost_nothing = !captured.contains(session.session_id) && IsAsLastStepLeftItLocked(session);
    if (!lost_nothing) here.push_back(session);
  }
  if (absl::Status past = CheckPastLocked(window_.generation(), here, {}); !past.ok()) return past;
  return AccumulationLedger::Match(captured, here);
}

bool Head::IsAsLastStepLeftItLocked(const SessionMarks& session) const {
  const StepRecord& last = window_.last_step();
  if (last.generation + 1 != window_.generation()) return false;
  if (session.past.known() && session.past.restores != history_.restores()) return false;
  return std::any_of(last.marks.begin(), last.marks.end(),
                     [&session](const SessionMarks& one) { return Same({one}, {session}); });
}

std::vector<GradientFile> Head::GradientFilesLocked(const HeadCheckpoint& state) const {
  std::vector<GradientFile> files;
  bool window = false;
  bool next = false;
  const bool sealed = state.window.state == WindowState::kSealed;
  for (const SessionCheckpoint& entry : state.sessions) {
    bool contributed = false;
    for (const Lane& lane : entry.session.lanes) {
      contributed = contributed || (sealed ? lane.next_base : lane.accepted) > lane.base;
      next = next || (sealed && lane.accepted > lane.next_base);
    }
    if (!sessions_.IsDeterministic(entry.id)) {
      window = window || contributed;
    } else if (contributed) {
      files.push_back({SessionGradient(entry.session.number), sessions_.GradientOf(entry.id)});
    }
  }
  if (window) files.push_back({kOwnGradient, gradients_.Of(window_.in_second())});
  if (next && gradients_.has_second()) files.push_back({kNextGradient, gradients_.Of(!window_.in_second())});
  return files;
}

StateKeys Head::KeysLocked() const {
  const std::string head = absl::StrCat(number_, ".", history_.restores(), ".");
  return {.weights = absl::StrCat(head, weights_.version()),
          .optimizer = absl::StrCat(head, weights_.optimizer_steps()),
          .gradients = absl::StrCat(head, window_.generation(), ".", gradient_changes_.load())};
}

// Saves that steps make due

// A step that was skipped leaves nothing that a checkpoint would not have already.
Head::StepSave Head::CaptureStepLocked(const StepResult& step) const {
  StepSave save;
  if (environment_.step_saver == nullptr || step.skipped) return save;
  save.due = environment_.step_saver->Look(weights_.optimizer_steps(), history_.restores());
  const bool copies = save.due == StepSaver::Due::kBegins && !environment_.place.shared();
  if (copies) save.captured = CaptureLocked(SaveAs::kTagged, {});
  return save;
}

void Head::BeginStepSave(StepSave save) {
  if (save.due == StepSaver::Due::kNo) return;
  if (save.due == StepSaver::Due::kBegins && !environment_.place.shared()) {
    const absl::Status copied = environment_.step_saver->Begin(std::move(save.captured), backend_.get());
    if (!copied.ok()) OnDeviceFailure(copied);
  }
  environment_.on_step_save(shared_from_this(), save.due);
}

std::optional<int64_t> Head::StepsSinceCheckpointLocked() const {
  if (!environment_.keeps_checkpoints || config_.optimizer.kind == OptimizerKind::kNone) return std::nullopt;
  // Less for a moment, while a restore comes to its end.
  return std::max<int64_t>(0, weights_.optimizer_steps() - checkpoint_steps_);
}

// Restoring

void Head::Restore(RestoreAs as, const RestoreNumbers& numbers, std::shared_ptr<const StateSource> source,
                   std::vector<SessionMemory> memory, std::function<void(absl::StatusOr<FileKeys>)> done) {
  struct Input {
    std::shared_ptr<const StateSource> source;
    std::vector<SessionMemory> memory;
  };
  auto input = std::make_shared<Input>(std::move(source), std::move(memory));
  PostSettled([self = shared_from_this(), as, numbers, input, done = std::move(done)] {
    absl::StatusOr<FileKeys> keys = self->RestoreNow(as, numbers, *input->source, std::move(input->memory));
    input->source.reset();  // its memory is free before anybody learns that the head is back
    done(std::move(keys));
  });
}

void Head::PostSettled(std::function<void()> task) {
  const MutexLock lock(mutex_);
  PostLastLocked({.closes = LastTask::Closes::kNone, .changes_weights = true},
                 [self = shared_from_this(), task = std::move(task)] {
                   if (self->Settled()) return task();
                   self->PostSettled(task);  // behind the work that came while this waited
                 });
}

bool Head::Settled() const {
  const MutexLock lock(mutex_);
  return window_work_ == 0;
}

absl::StatusOr<FileKeys> Head::RestoreNow(RestoreAs as, const RestoreNumbers& numbers,
                                          const StateSource& source, std::vector<SessionMemory> memory) {
  const HeadCheckpoint& state = source.checkpoint();
  MoreMemory more;
  if (absl::Status begun = BeginRestore(state, &memory, &more); !begun.ok()) return begun;
  // From here on an error leaves the head half restored: it ends.
  HeadStateReader reader(&config_, backend_.get(), &source);
  absl::StatusOr<SessionTable::DeterministicSessions> sessions = SessionTable::DeterministicSessions{};
  absl::Status status = reader.ReadTensors();
  if (status.ok()) {
    sessions = RestoreSessions(reader, state, std::move(memory), std::move(more));
    status = sessions.status();
  }
  if (status.ok()) status = RestoreWindow(as, reader);
  if (!status.ok()) {
    if (reader.device().ok()) {
      EndInPieces(status);
    } else {
      OnDeviceFailure(reader.device());
    }
    return status;
  }
  Install(as, numbers, state, *std::move(sessions));
  return KeysOf(state.tensors);
}

FileKeys Head::KeysOf(const std::vector<StateTensor>& tensors) const {
  FileKeys keys;
  const MutexLock lock(mutex_);
  const StateKeys now = KeysLocked();
  for (const StateTensor& tensor : tensors) keys.emplace_back(TensorFile(tensor.name), KeyOf(now, tensor));
  return keys;
}

// From now on no window ends until the restore is over. Adds the memory of the present deterministic sessions
// to `memory`.
absl::Status Head::BeginRestore(const HeadCheckpoint& state, std::vector<SessionMemory>* memory,
                                MoreMemory* more) {
  const MutexLock lock(mutex_);
  absl::Status status = CheckRestorableLocked(state, static_cast<int64_t>(memory->size()));
  if (!status.ok()) return status;
  absl::StatusOr<MoreMemory> reserved = ReserveForTiles(state);
  if (!reserved.ok()) return reserved.status();
  *more = *std::move(reserved);
  // Taken at once: a session that is closed meanwhile would free its memory.
  sessions_.TakeMemory(memory);
  lifecycle_.BeginRestore(MakeError(absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
                                    absl::StrCat("head ", config_.name, " is being restored")));
  return absl::OkStatus();
}

absl::Status Head::CheckRestorableLocked(const HeadCheckpoint& state, int64_t more_memory) const {
  if (!lifecycle_.admits().ok()) return lifecycle_.admits();
  if (window_.state() == WindowState::kSealing || window_work_ > 0) {
    return NotRestorable(config_, "a call that ends its window is under way; try again");
  }
  if (absl::Status same = CheckSameStateLocked(state, backend_->StateTensors()); !same.ok()) return same;
  int64_t needed = 0;
  if (absl::Status tiles = sessions_.CheckTiles(state, &needed); !tiles.ok()) return tiles;
  for (const SessionCheckpoint& session : state.sessions) {
    if (!session.tiles.has_value()) continue;
    if (absl::Status lists = CheckKeptLists(*session.tiles); !lists.ok()) return lists;
  }
  if (needed <= sessions_.deterministic_count() + more_memory) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
      absl::StrCat("the checkpoint cannot be restored to head ", config_.name,
                   ": a deterministic session whose memory it needs was closed a moment ago; try again"));
}

absl::Status Head::CheckKeptLists(const DeterministicTiles::Content& tiles) const {
  for (const Chunk& chunk : tiles.kept) {
    if (chunk.lists.use == ChunkLists::Use::kNone) continue;
    const absl::Status here = CheckListsHere(chunk);
    if (!here.ok()) {
      return NotRestorable(
          config_, absl::StrCat("of tokens whose gradients are still to be computed, ", here.message()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Head::MoreMemory> Head::ReserveForTiles(const HeadCheckpoint& state) const {
  MoreMemory more;
  for (const SessionCheckpoint& session : state.sessions) {
    if (!session.tiles.has_value()) continue;
    std::unique_ptr<MemoryReservation>& own = more.emplace_back();
    const int64_t bytes = DeterministicTiles::MissingFor(*session.tiles);
    if (bytes == 0) continue;
    auto reserved = environment_.budget->Reserve(
        config_.name, absl::StrCat("lists of tokens in a deterministic session of head ", config_.name),
        {{"tiles", bytes}});
    if (!reserved.ok()) return reserved.status();
    own = *std::move(reserved);
  }
  return more;
}

absl::Status Head::CheckSameStateLocked(const HeadCheckpoint& state,
                                        const std::vector<StateTensor>& tensors) const {
  const auto same = [](const StateTensor& a, const StateTensor& b) {
    return a.name == b.name && a.type == b.type && a.rows == b.rows && a.columns == b.columns;
  };
  if (state.weight_version == 0 && weights_.version() > 0) {
    return NotRestorable(config_, "it is of a time without weights");
  }
  if (state.weight_version > 0 &&
      !std::equal(tensors.begin(), tensors.end(), state.tensors.begin(), state.tensors.end(), same)) {
    return NotRestorable(config_, "it has other tensors than the head has here");
  }
  return absl::OkStatus();
}

// Gives each deterministic session of the checkpoint its part of `memory` and `more`.
absl::StatusOr<SessionTable::DeterministicSessions> Head::RestoreSessions(HeadStateReader& reader,
                                                                          const HeadCheckpoint& state,
                                                                          std::vector<SessionMemory> memory,
                                                                          MoreMemory more) {
  SessionTable::DeterministicSessions sessions;
  auto next_more = more.begin();
  for (const SessionCheckpoint& entry : state.sessions) {
    if (!entry.tiles.has_value()) continue;
    // BeginRestore has counted them.
    if (memory.empty()) return absl::InternalError("there is no memory for a deterministic session");
    SessionMemory own = std::move(memory.back());
    memory.pop_back();
    absl::Status read = reader.ReadGradient(SessionGradient(entry.session.number), own.gradient.get());
    if (!read.ok()) return read;
    const MutexLock lock(mutex_);
    sessions.emplace(entry.id, sessions_.Restore(entry, std::move(own), std::move(*next_more++), config_));
  }
  for (SessionMemory& unused : memory) Drop(unused);
  return sessions;
}

absl::Status Head::RestoreWindow(RestoreAs as, HeadStateReader& reader) {
  if (frozen()) return absl::OkStatus();
  Gradient* const first = gradients_.Of(false);
  absl::Status status = reader.ReadGradient(kOwnGradient, first);
  if (!status.ok() || !gradients_.has_second()) return status;
  Gradient* const second = gradients_.Of(true);
  status = reader.ReadGradient(kNextGradient, second);
  if (!status.ok() || !Reopens(as, reader.state())) return status;
  return reader.Fold(second, first);
}

// All at once, as every other thread sees it.
void Head::Install(RestoreAs as, const RestoreNumbers& numbers, HeadCheckpoint state,
                   SessionTable::DeterministicSessions sessions) {
  const bool tagged = as == RestoreAs::kTagged;
  if (Reopens(as, state)) state.window = Reopened(std::move(state.window));
  SessionTable::Cut cut;
  WeightStore::Undone undone;
  absl::Status restored;
  {
    // The next write's buffer comes after this one's has gone: the reservation covers one.
    const MutexLock making(begin_write_mutex_);
    {
      const MutexLock lock(mutex_);
      if (tagged) undone = weights_.UndoWrites();
      uint64_t version = state.weight_version;
      // One may have been published since the numbers were given.
      if (tagged && version > 0) version = std::max(numbers.weight_version, weights_.version() + 1);
      StepResult& step = state.window.last_step.result;
      if (step.weight_version == state.weight_version) step.weight_version = version;
      sessions_.Install(state, std::move(sessions), &cut);
      FinishCutLocked(cut);
      window_.Install(state.window, absl::Now());
      weights_.Install({version, state.optimizer_steps, tagged ? "" : state.last_committed_write,
                        state.last_committed_version});
      if (tagged) {
        history_.Restore(numbers.restores, state.ancestors, AncestorOf(state));
      } else {
        history_.Continue(state.restores, state.ancestors);
      }
      lifecycle_.EndRestore();
      restored =
          MakeError(absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
                    absl::StrCat("head ", config_.name, " was restored from a checkpoint of generation ",
                                 window_.generation(), "; open the session again"));
    }
    if (undone.staged != nullptr) undone.staged->Take();
  }
  for (const auto& waiter : undone.waiters) waiter(undone.status);
  TellEnd(cut, restored);
}

// The device has a part of the checkpoint, and the disk does not give the rest.
void Head::EndInPieces(const absl::Status& status) {
  const absl::Status ended = Refused(
      absl::StatusCode::kDataLoss, absl::StrCat("a restore of head ", config_.name, " broke off (",
                                                status.message(), "): delete the head and restore it again"));
  {
    const MutexLock lock(mutex_);
    lifecycle_.End(ended);
  }
  EndStreams(ended);
}

}  // namespace lossd::engine
