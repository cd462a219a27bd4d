// The engine's checkpoints: of a head when it is asked for, of all heads when the server goes away.
#include <algorithm>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/common/errors.h"
#include "server/engine/engine.h"
#include "server/engine/parked_head.h"

namespace lossd::engine {
namespace {

absl::Status NoFolder() {
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kCheckpoint, "",
                   "the server keeps no checkpoints; start it with --checkpoint_dir");
}

void Count(bool ok, absl::Time begun, OperationCounters* counters) {
  ++(ok ? counters->ok : counters->failed);
  counters->seconds.Observe(absl::ToDoubleSeconds(absl::Now() - begun));
}

// The drain's own is not for callers.
absl::Status CheckTag(const std::string& tag) {
  if (IsName(tag)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, RejectReason::kOption, "tag",
      absl::StrCat("tag is '", tag.substr(0, 128),
                   "'; it must be 1 to 128 characters of [A-Za-z0-9._-] and start with a letter or "
                   "a digit"));
}

// A replica that is asked when all have parted may be UNAVAILABLE before it is known to be lost.
bool MayBeLoss(const absl::Status& status) { return absl::IsUnavailable(status); }

// The error that holds up a set whose replicas have weights of the head. `tag`: of the newest checkpoint, or
// "TAG" if its manifest cannot be read; `why` names the path then.
absl::Status CannotGoBack(const std::string& head, const std::string& tag, const absl::Status& why) {
  const std::string command =
      IsName(tag) ? absl::StrCat("`lossctl checkpoint delete ", head, " ", tag, "`, or ") : "";
  return absl::Status(
      why.code(),
      absl::StrCat("head ", head, " cannot go back to its newest checkpoint, ", tag, ": ", why.message(),
                   "; no older one is taken unasked: mend that, or delete this checkpoint (", command,
                   "remove the folder heads/", head, "/", tag,
                   " from --checkpoint_dir of replica 0), to go back to the one before; without one the head "
                   "is gone"));
}

// How often a restore is tried that found less memory than when it was begun.
constexpr int kTriesToRestore = 8;

}  // namespace

absl::Status Engine::CheckKeepsCheckpoints() const {
  const ReplicaPlace& place = options_.place;
  if (place.shared() && !place.coordinates()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kCheckpoint, "",
                     absl::StrCat("this server is replica ", place.replica,
                                  "; checkpoints are kept by replica ", ReplicaPlace::kCoordinator));
  }
  return options_.checkpoints == nullptr ? NoFolder() : absl::OkStatus();
}

absl::StatusOr<SavedCheckpoint> Engine::SaveCheckpoint(const std::string& head, const std::string& tag,
                                                       const CheckpointPast& expected) {
  if (absl::Status keeps = CheckKeepsCheckpoints(); !keeps.ok()) return keeps;
  if (absl::Status named = CheckTag(tag); !named.ok()) return named;
  const MutexLock saving(checkpoint_mutex_);  // no restore meanwhile, and the head is not deleted
  const absl::StatusOr<std::shared_ptr<Head>> found = FindHeadAndWait(head);
  if (!found.ok()) return found.status();
  if (absl::Status same = CheckPast(**found, expected); !same.ok()) return same;
  absl::StatusOr<SavedCheckpoint> saved = Save(**found, tag, Head::SaveAs::kTagged, expected.marks);
  if (saved.ok()) DeleteBeyondKept(options_.checkpoint_keep, &*saved);
  MeasureCheckpoints();
  return saved;
}

absl::Status Engine::CheckPast(const Head& head, const CheckpointPast& expected) const {
  const uint64_t restores = head.restores();
  absl::string_view other;
  if (!expected.incarnation.empty() && expected.incarnation != incarnation_) {
    other = "incarnation";
  } else if (expected.history != 0 && expected.history != replicas_.Read().history) {
    other = "history";
  } else if (expected.restores.value_or(restores) != restores) {
    other = "restores";
  } else {
    return absl::OkStatus();
  }
  absl::Status status =
      MakeError(absl::StatusCode::kAborted, RejectReason::kIncarnation, other,
                absl::StrCat("head ", head.config().name,
                             " was restored from a checkpoint since, or is another server's: what was "
                             "done before may be undone, and is not saved"));
  AttachPosition(&status, Position{incarnation_, head.Info().generation, {}});
  return status;
}

void Engine::DeleteBeyondKept(int64_t keep, SavedCheckpoint* saved) {
  if (keep == 0) return;
  CheckpointStore& store = *options_.checkpoints;
  const absl::StatusOr<std::vector<std::string>> beyond =
      store.BeyondNewest(saved->info.head, saved->info.tag, keep);
  if (!beyond.ok()) {
    saved->not_deleted = beyond.status();
    return;
  }
  // One that cannot be deleted keeps the others, which are older, from nothing.
  for (const std::string& tag : *beyond) {
    const absl::Status deleted = store.Delete(saved->info.head, tag).status();
    if (deleted.ok()) {
      saved->deleted.push_back(tag);
    } else {
      saved->not_deleted.Update(deleted);
    }
  }
}

absl::StatusOr<DeletedCheckpoint> Engine::DeleteCheckpoint(const std::string& head, const std::string& tag) {
  if (absl::Status keeps = CheckKeepsCheckpoints(); !keeps.ok()) return keeps;
  if (absl::Status named = CheckTag(tag); !named.ok()) return named;
  const MutexLock deleting(checkpoint_mutex_);  // none is being saved or restored
  absl::StatusOr<DeletedCheckpoint> deleted = options_.checkpoints->Delete(head, tag);
  MeasureCheckpoints();
  return deleted;
}

void Engine::MeasureCheckpoints() {
  if (options_.checkpoints == nullptr) return;
  // The figure is for graphs and an alert: one that cannot be had now is had the next time.
  if (const auto bytes = options_.checkpoints->Measure(); bytes.ok()) {
    counters_.checkpoint_used_bytes = bytes->all;
  }
}

CheckpointDisk Engine::ReadCheckpointDisk() const {
  if (options_.checkpoints == nullptr) return {};
  const absl::StatusOr<DiskSpace> space = options_.checkpoints->Space();
  if (!space.ok()) return {.used = counters_.checkpoint_used_bytes};
  return {.used = counters_.checkpoint_used_bytes, .free = space->free, .total = space->total};
}

absl::StatusOr<SavedCheckpoint> Engine::Save(Head& head, const std::string& tag, Head::SaveAs as,
                                             const Marks& named) {
  const absl::Time begun = absl::Now();
  return Counted(begun, SaveUncounted(head, tag, as, named));
}

absl::StatusOr<SavedCheckpoint> Engine::Counted(absl::Time begun, absl::StatusOr<SavedCheckpoint> saved) {
  Count(saved.ok(), begun, &counters_.checkpoint_saves);
  if (saved.ok()) {
    counters_.checkpoint_bytes += static_cast<uint64_t>(saved->bytes_written);
    counters_.checkpoint_saved_at_seconds = absl::ToUnixSeconds(absl::Now());
  }
  return saved;
}

absl::StatusOr<SavedCheckpoint> Engine::SaveUncounted(Head& head, const std::string& tag, Head::SaveAs as,
                                                      const Marks& named) {
  CheckpointStore& store = *options_.checkpoints;
  absl::StatusOr<std::unique_ptr<CheckpointWriter>> writer = store.Begin(head.config().name, tag);
  if (!writer.ok()) return writer.status();
  absl::StatusOr<HeadCheckpoint> checkpoint = WriteState(head, as, named, writer->get());
  if (!checkpoint.ok()) return checkpoint.status();
  // The newest checkpoint is that of the latest step: what was copied before this one is written before it.
  if (head.step_saver() != nullptr && !options_.place.shared()) {
    const auto pending = head.step_saver()->pending();
    if (pending.has_value() && pending->steps <= checkpoint->optimizer_steps) WriteStepSave(head);
  }
  return Commit(head, **writer, *std::move(checkpoint));
}

absl::StatusOr<SavedCheckpoint> Engine::Commit(Head& head, CheckpointWriter& writer,
                                               HeadCheckpoint checkpoint) {
  const absl::StatusOr<CheckpointInfo> info = options_.checkpoints->Commit(writer, std::move(checkpoint));
  if (!info.ok()) return info.status();
  head.NoteCheckpoint(info->optimizer_steps);
  return SavedCheckpoint{*info, writer.bytes_written()};
}

Engine::Others Engine::ConfiguredOthers() {
  const auto unknown = [](const auto&) {
    return absl::UnimplementedError("this server has no way to the other replicas");
  };
  Others others{.replicas = unknown,
                .create = [](const HeadConfig&) { return absl::OkStatus(); },
                .drop = [](const std::string&) { return absl::OkStatus(); }};
  if (options_.find_replicas != nullptr) others.replicas = options_.find_replicas;
  if (options_.create_together != nullptr) others.create = options_.create_together;
  if (options_.delete_together == nullptr) return others;
  others.drop = [this](const std::string& name) {
    const MutexLock together(together_mutex_);
    return options_.delete_together(name, DiscardGradient::kYes, [] { return absl::OkStatus(); }).status();
  };
  return others;
}

absl::StatusOr<HeadCheckpoint> Engine::WriteStateOfAll(Head& head, const Marks& named, SavedWindow window,
                                                       StateSink* sink) {
  const absl::StatusOr<JointReplicas> replicas = ConfiguredOthers().replicas(head);
  if (!replicas.ok()) return replicas.status();
  return SaveTogether(head.shared_from_this(), *replicas, named, window, sink);
}

absl::StatusOr<HeadCheckpoint> Engine::WriteState(Head& head, Head::SaveAs as, const Marks& named,
                                                  StateSink* sink) {
  if (options_.place.shared()) {
    // A drain without a checkpoint loses whole windows; clients send the tokens of this one again.
    const bool drains = as == Head::SaveAs::kDrained;
    return WriteStateOfAll(head, named, drains ? SavedWindow::kWhereItCan : SavedWindow::kAsItIs, sink);
  }
  std::promise<absl::StatusOr<HeadCheckpoint>> written;
  head.Save(as, named, sink, [&written](absl::StatusOr<HeadCheckpoint> checkpoint) {
    written.set_value(std::move(checkpoint));
  });
  return written.get_future().get();
}

absl::StatusOr<CheckpointInfo> Engine::RestoreCheckpoint(const std::string& head, const std::string& tag) {
  if (absl::Status keeps = CheckKeepsCheckpoints(); !keeps.ok()) return keeps;
  if (absl::Status status = CheckServing(); !status.ok()) return status;
  if (absl::Status named = CheckTag(tag); !tag.empty() && !named.ok()) return named;
  const MutexLock restoring(checkpoint_mutex_);  // the head is not deleted meanwhile
  const absl::Time begun = absl::Now();
  absl::StatusOr<CheckpointReader> reader = options_.checkpoints->Find(head, tag);
  if (!reader.ok()) {
    // One that is there and cannot be read, not one that never was.
    if (!absl::IsNotFound(reader.status())) Count(false, begun, &counters_.checkpoint_restores);
    return reader.status();
  }
  absl::StatusOr<CheckpointInfo> restored = Restore(*std::move(reader), Head::RestoreAs::kTagged);
  MeasureCheckpoints();
  return restored;
}

absl::StatusOr<CheckpointInfo> Engine::Restore(CheckpointReader found, Head::RestoreAs as) {
  const absl::Time begun = absl::Now();
  absl::StatusOr<CheckpointInfo> restored = RestoreUncounted(std::move(found), as);
  Count(restored.ok(), begun, &counters_.checkpoint_restores);
  return restored;
}

absl::StatusOr<CheckpointInfo> Engine::RestoreUncounted(CheckpointReader found, Head::RestoreAs as) {
  const auto reader = std::make_shared<CheckpointReader>(std::move(found));
  if (absl::Status verified = reader->Verify(); !verified.ok()) return verified;
  const HeadConfig& config = reader->checkpoint().config;
  const bool was_there = FindParked(config.name).has_value() || FindHere(config.name).ok();
  // A drained server goes on alone: of all others each is a process of its own, and is told of a restore.
  if (options_.place.shared()) as = Head::RestoreAs::kTagged;
  absl::StatusOr<std::shared_ptr<Head>> head = CreateHere(config);
  if (absl::IsAlreadyExists(head.status())) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kCheckpoint, "head",
                     absl::StrCat("the checkpoint is of another configuration: ", head.status().message()));
  }
  if (!head.ok()) return head.status();
  const Others others = ConfiguredOthers();
  if (absl::Status created = others.create(config); !created.ok()) {
    if (!was_there && !IsReplicaLost(created)) DropHead(config.name);
    return created;
  }
  const absl::Status restored = RestoreTo(**head, reader, as, others);
  const bool lost = options_.place.shared() && MayBeLoss(restored);  // the next meeting decides
  if (!restored.ok() && !was_there && !lost) DropCreated(**head, others);
  if (!restored.ok()) return restored;
  return MarkRestored(**head, *reader);
}

// Not DeleteHead: nobody wants it gone, and the next start is to try again.
void Engine::DropCreated(const Head& head, const Others& others) {
  if (head.weight_version() > 0) return;  // somebody has published weights meanwhile
  const std::string name = head.config().name;
  // If a replica is lost meanwhile, the head stays here, and GoBack drops it.
  if (others.drop(name).ok()) DropHead(name);
}

absl::StatusOr<CheckpointInfo> Engine::MarkRestored(Head& head, const CheckpointReader& reader) {
  head.NoteCheckpoint(reader.checkpoint().optimizer_steps);
  // Not sooner: until now there was no way back.
  if (absl::Status live = options_.checkpoints->MarkLive(head.config().name); !live.ok()) return live;
  return reader.info();
}

// Memory for the checkpoint's deterministic sessions, beyond that which those of the head have.
absl::StatusOr<std::vector<SessionMemory>> Engine::MissingMemory(const Head& head,
                                                                 const HeadCheckpoint& checkpoint) {
  const MutexLock creating(create_mutex_);  // as everything that takes memory of the device
  std::vector<SessionMemory> memory;
  int64_t missing = -head.deterministic_sessions();
  for (const SessionCheckpoint& session : checkpoint.sessions) {
    if (session.tiles.has_value()) ++missing;
  }
  for (; missing > 0; --missing) {
    absl::StatusOr<SessionMemory> taken = TakeMemory(head.config());
    if (!taken.ok()) return taken.status();
    memory.push_back(*std::move(taken));
  }
  return memory;
}

absl::StatusOr<FileKeys> Engine::TryToRestore(Head& head, Head::RestoreAs as, const RestoreNumbers& numbers,
                                              const std::shared_ptr<const CheckpointReader>& reader) {
  absl::StatusOr<std::vector<SessionMemory>> memory = MissingMemory(head, reader->checkpoint());
  if (!memory.ok()) return memory.status();
  std::promise<absl::StatusOr<FileKeys>> done;
  head.Restore(as, numbers, reader, *std::move(memory),
               [&done](absl::StatusOr<FileKeys> keys) { done.set_value(std::move(keys)); });
  return done.get_future().get();
}

absl::Status Engine::RestoreTo(Head& head, const std::shared_ptr<const CheckpointReader>& reader,
                               Head::RestoreAs as, const Others& others) {
  const HeadCheckpoint& checkpoint = reader->checkpoint();
  absl::StatusOr<RestoreNumbers> numbers = RestoreNumbers{checkpoint.restores, checkpoint.weight_version};
  if (as == Head::RestoreAs::kTagged) {
    numbers = options_.checkpoints->NextRestore(head.config().name, *numbers,
                                                {head.restores(), head.weight_version()});
  }
  if (!numbers.ok()) return numbers.status();
  const absl::StatusOr<FileKeys> keys = options_.place.shared() ? RestoreAll(head, *numbers, reader, others)
                                                                : RestoreHere(head, as, *numbers, reader);
  if (!keys.ok()) return keys.status();
  for (const auto& [file, key] : *keys) options_.checkpoints->Remember(*reader, file, key);
  AdoptSessions(head);
  return absl::OkStatus();
}

absl::StatusOr<FileKeys> Engine::RestoreHere(Head& head, Head::RestoreAs as, const RestoreNumbers& numbers,
                                             const std::shared_ptr<const CheckpointReader>& reader) {
  absl::StatusOr<FileKeys> keys = TryToRestore(head, as, numbers, reader);
  // A session may close, and free its memory, after MissingMemory has counted it.
  for (int again = 1; again < kTriesToRestore && absl::IsUnavailable(keys.status()); ++again) {
    keys = TryToRestore(head, as, numbers, reader);
  }
  return keys;
}

absl::StatusOr<FileKeys> Engine::RestoreAll(Head& head, const RestoreNumbers& numbers,
                                            const std::shared_ptr<const CheckpointReader>& reader,
                                            const Others& others) {
  const absl::StatusOr<JointReplicas> replicas = others.replicas(head);
  if (!replicas.ok()) return replicas.status();
  return RestoreTogether(head.shared_from_this(), *replicas, numbers, reader);
}

absl::StatusOr<CheckpointInfo> Engine::GoBackTo(CheckpointReader found, const Others& others) {
  const auto reader = std::make_shared<CheckpointReader>(std::move(found));
  if (absl::Status verified = reader->Verify(); !verified.ok()) return verified;
  const HeadConfig& config = reader->checkpoint().config;
  const absl::StatusOr<std::shared_ptr<Head>> head = ReplaceHead(config);
  if (!head.ok()) return head.status();
  absl::Status restored = others.create(config);
  if (restored.ok()) restored = RestoreTo(**head, reader, Head::RestoreAs::kTagged, others);
  if (!restored.ok()) return restored;
  return MarkRestored(**head, *reader);
}

absl::StatusOr<bool> Engine::HasLiveCheckpoints(const std::string& head) const {
  if (options_.checkpoints == nullptr) return false;
  const absl::StatusOr<std::vector<std::string>> live = options_.checkpoints->LiveHeads();
  if (!live.ok()) return live.status();
  return std::find(live->begin(), live->end(), head) != live->end();
}

absl::StatusOr<CheckpointReader> Engine::NewestWithWeights(const std::string& head) {
  const absl::StatusOr<bool> live = HasLiveCheckpoints(head);
  if (!live.ok()) return live.status();
  if (!*live) return absl::NotFoundError(absl::StrCat("no checkpoint of \"", head, "\""));
  absl::StatusOr<CheckpointReader> newest = options_.checkpoints->Find(head, "");
  if (newest.ok() && newest->checkpoint().weight_version == 0) {
    return absl::NotFoundError(
        absl::StrCat("the newest checkpoint of \"", head, "\" is of a time without weights"));
  }
  return newest;
}

absl::StatusOr<Engine::WentBack> Engine::GoBack(const Agreement& agreement, const Others& others) {
  const MutexLock restoring(checkpoint_mutex_);
  WentBack went;
  absl::Status failed;  // the first one; the other heads go back all the same
  const auto drop = [&](const std::string& name, const absl::Status& why) {
    DropHead(name);
    failed.Update(others.drop(name));
    went.gone.push_back({name, why});
  };
  for (const std::string& name : agreement.go_back) {
    const absl::Time begun = absl::Now();
    absl::StatusOr<CheckpointReader> reader = NewestWithWeights(name);
    if (absl::IsNotFound(reader.status())) {
      drop(name, absl::OkStatus());
      continue;
    }
    const std::string tag = reader.ok() ? reader->info().tag : "TAG";
    absl::StatusOr<CheckpointInfo> restored =
        reader.ok() ? GoBackTo(*std::move(reader), others) : absl::StatusOr<CheckpointInfo>(reader.status());
    Count(restored.ok(), begun, &counters_.checkpoint_restores);
    if (restored.ok()) {
      went.restored.push_back(*std::move(restored));
    } else if (MayBeLoss(restored.status())) {
      failed.Update(restored.status());
    } else if (agreement.empty.contains(name)) {
      drop(name, restored.status());
    } else {
      failed.Update(CannotGoBack(name, tag, restored.status()));
    }
  }
  if (!failed.ok()) return failed;
  return went;
}

bool Engine::IsHalfRestored(const Head& head) {
  if (head.weight_version() > 0) return false;
  const MutexLock restoring(checkpoint_mutex_);
  return !absl::IsNotFound(NewestWithWeights(head.config().name).status());
}

void Engine::InstallRestored(Head& head) {
  head.InstallRestoredPart();
  AdoptSessions(head);
}

void Engine::LeaveEpoch() {
  for (const std::shared_ptr<Head>& head : Heads()) head->LeaveEpoch();
}

// Sessions are what the head says. They have credit even if it is more than is set aside: the server had it.
void Engine::AdoptSessions(const Head& head) {
  const MutexLock lock(mutex_);
  const std::map<std::string, int32_t> open = head.OpenSessions();
  const auto found = heads_.find(head.config().name);
  if (found == heads_.end() || found->second.get() != &head) return;  // deleted meanwhile
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    if (it->second.head.get() != &head || open.contains(it->first)) {
      ++it;
      continue;
    }
    staging_reserved_ -= it->second.staging_bytes();
    it = sessions_.erase(it);
  }
  for (const auto& [id, lanes] : open) {
    if (!sessions_.contains(id)) AddSessionLocked(id, found->second, lanes);
  }
}

absl::StatusOr<std::vector<CheckpointInfo>> Engine::ListCheckpoints(const std::string& head) {
  if (absl::Status keeps = CheckKeepsCheckpoints(); !keeps.ok()) return keeps;
  const MutexLock listing(checkpoint_mutex_);
  return options_.checkpoints->List(head);
}

// Behind what is just coming back: it is in one of both places.
Engine::HeadList Engine::HeadsToDrain() {
  const MutexLock creating(create_mutex_);
  return AllHeads();
}

absl::StatusOr<DrainedHeads> Engine::SaveForDrain() {
  if (absl::Status keeps = CheckKeepsCheckpoints(); !keeps.ok()) return keeps;
  const MutexLock saving(checkpoint_mutex_);
  DrainedHeads all;
  DrainRecord record{incarnation_, {}, {}};
  const HeadList heads = HeadsToDrain();
  for (const std::shared_ptr<Head>& head : heads.here) {
    // There is nothing in it, and what an earlier server saved of it must stay.
    if (head->weight_version() == 0) continue;
    absl::StatusOr<SavedCheckpoint> saved = Save(*head, kDrainTag, Head::SaveAs::kDrained);
    if (!saved.ok()) {
      record.heads.emplace(head->config().name, 0);
      all.failed.emplace(head->config().name, saved.status());
      continue;
    }
    record.heads.emplace(saved->info.head, saved->info.saved_at);
    all.saved.push_back(*std::move(saved));
  }
  for (const auto& [name, parked] : heads.parked) {
    if (parked->checkpoint().weight_version == 0) continue;
    absl::StatusOr<SavedCheckpoint> saved = SaveParked(*parked);
    record.heads.emplace(name, saved.ok() ? saved->info.saved_at : 0);
    if (!saved.ok()) {
      all.failed.emplace(name, saved.status());
      continue;
    }
    record.parked.insert(name);
    all.saved.push_back(*std::move(saved));
  }
  MeasureCheckpoints();
  // A record of no heads would have the next server restore none.
  if (all.saved.empty()) return all;
  if (absl::Status written = options_.checkpoints->WriteDrain(record); !written.ok()) return written;
  return all;
}

// The head went back to its newest checkpoint when the replicas met.
bool Engine::IsAtOthers(const std::string& name) const {
  if (!options_.place.shared()) return false;
  const absl::StatusOr<std::shared_ptr<Head>> head = FindHere(name);
  return head.ok() && (*head)->weight_version() > 0;
}

absl::StatusOr<std::vector<CheckpointInfo>> Engine::RestoreAtStart(const std::optional<DrainRecord>& drain) {
  if (absl::Status keeps = CheckKeepsCheckpoints(); !keeps.ok()) return keeps;
  const MutexLock restoring(checkpoint_mutex_);
  std::vector<std::string> names;
  if (drain.has_value()) {
    for (const auto& [name, saved_at] : drain->heads) names.push_back(name);
  } else {
    absl::StatusOr<std::vector<std::string>> heads = options_.checkpoints->LiveHeads();
    if (!heads.ok()) return heads.status();
    names = *std::move(heads);
  }
  std::vector<CheckpointInfo> all;
  for (const std::string& name : names) {
    if (IsAtOthers(name)) continue;
    const int64_t saved_at = drain.has_value() ? drain->heads.at(name) : 0;
    const bool drained = saved_at != 0;
    absl::StatusOr<CheckpointReader> reader = options_.checkpoints->Find(name, drained ? kDrainTag : "");
    if (!drained && absl::IsNotFound(reader.status())) continue;  // a head that never had any
    if (!reader.ok()) return reader.status();
    if (drained && reader->info().saved_at != saved_at) {
      return MakeError(
          absl::StatusCode::kDataLoss, RejectReason::kCheckpoint, "",
          absl::StrCat("the drain checkpoint of head ", name,
                       " is not the one that drain.json names: remove drain.json to start from the "
                       "newest checkpoints"));
    }
    if (drained && drain->parked.contains(name) && !options_.place.shared()) {
      const CheckpointInfo info = reader->info();
      const absl::StatusOr<bool> parked = ParkDrained(*reader);
      if (!parked.ok()) return parked.status();
      if (*parked) {
        all.push_back(info);
        continue;
      }
    }
    absl::StatusOr<CheckpointInfo> restored =
        Restore(*std::move(reader), drained ? Head::RestoreAs::kDrained : Head::RestoreAs::kTagged);
    if (!restored.ok()) return restored.status();
    all.push_back(*std::move(restored));
  }
  return all;
}

}  // namespace lossd::engine
