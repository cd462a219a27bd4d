// What happens to a simulated server: checkpoints, drains, kills, heads deleted, weights written.
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/common/errors.h"
#include "tests/simulation/schedule.h"

namespace lossd::simulation {

bool Schedule::SameServer() const {
  for (int32_t replica = 0; replica < server_->replica_count(); ++replica) {
    const std::shared_ptr<engine::Head> head = server_->head(replica);
    if (head == nullptr || head->restores() != restores_) return false;
  }
  return Incarnations() == incarnations_;
}

// A trainer whose server is another one, or an earlier one, hears so whatever it asks, and replays.
bool Schedule::LostServer() {
  if (SameServer()) return false;
  if (!SetIsSettled()) return true;
  EndDoomedEpoch();
  const std::shared_ptr<engine::Head> head = server_->head();
  for (const ClientState& client : clients_) {
    if (client.session == nullptr) continue;
    const engine::Engine& engine = server_->engine(client.session->replica);
    if (client.session->incarnation == engine.incarnation()) continue;
    const auto found = engine.FindSession(client.session->id, client.session->incarnation);
    if (engine::ReasonOf(found.status()) != engine::RejectReason::kIncarnation) {
      Diverge(absl::StrCat("a session of another incarnation: ", Text(found.status())));
    }
  }
  if (head == nullptr || head->weight_version() == 0) {
    // Nothing was restored: the trainer has the weights. Replicas may have had the head in one incarnation.
    old_call_.reset();
    ForgetWrite();
    versions_.clear();
    version_ = server_->Create(progress_.weights);
    if (version_ == 0) Diverge("weights cannot be written");
    versions_[version_] = progress_.weights;
    Replay(progress_);
  } else {
    KeepPast();
    if (!saved_.contains(restored_)) {
      Diverge("a head goes on from what nobody has saved");
      return true;
    }
    UndoWrite();
    const Progress progress = saved_.at(restored_).progress;
    Recall(saved_.at(restored_).logs);
    // In one incarnation no version is given to two weights.
    if (server_->engine().incarnation() != incarnations_.front()) versions_.clear();
    version_ = head->weight_version();
    if (versions_.contains(version_) && !(versions_[version_] == progress.weights)) {
      Diverge(absl::StrCat("weight version ", version_, " is given to other weights"));
    }
    versions_[version_] = progress.weights;
    if (!(server_->Weights() == progress.weights)) Diverge("the weights restored are others");
    Replay(progress);
  }
  return true;
}

void Schedule::Replay(const Progress& progress) {
  Count("window lost");
  ++replays_;
  const std::shared_ptr<engine::Head> head = server_->head();
  incarnations_ = Incarnations();
  restores_ = head->restores();
  progress_ = progress;
  const engine::HeadInfo info = head->Info();
  const std::vector<SessionMarks> window = WindowMarks();
  generation_ = info.generation;
  Say(absl::StrCat("the trainer replays from generation ", info.generation));
  for (auto& [id, session] : sessions_) {
    for (size_t lane = 0; lane < session->lanes.size(); ++lane) {
      Orphan(session->lanes[lane]);  // of an earlier time
      const uint64_t mark = MarkOf(window, id, static_cast<int32_t>(lane));
      ForgetAbove(*session, lane, mark);
      session->lanes[lane].accepted = session->lanes[lane].log.size();
    }
  }
  for (ClientState& client : clients_) {
    client.session = nullptr;
    client.generation = info.generation;
  }
  BackToIdle();
}

Logs Schedule::TakeLogs() const {
  Logs logs;
  for (const auto& [id, session] : sessions_) {
    for (const LaneState& lane : session->lanes) logs[id].push_back(lane.log);
  }
  return logs;
}

void Schedule::Recall(const Logs& logs) {
  std::map<size_t, std::map<uint64_t, Item>> to_send;  // by client and number
  for (size_t i = 0; i < clients_.size(); ++i) {
    for (const Item& item : clients_[i].pending) to_send[i][item.number] = item;
    clients_[i].pending.clear();
  }
  for (const auto& [id, session] : sessions_) {
    for (const LaneState& lane : session->lanes) {
      for (const Entry& entry : lane.log) {
        if (!entry.rejected) to_send[session->client][entry.item.number] = entry.item;
      }
    }
  }
  for (const auto& [id, session] : sessions_) {
    const auto then = logs.find(id);
    for (size_t i = 0; i < session->lanes.size(); ++i) {
      LaneState& lane = session->lanes[i];
      lane.log = then == logs.end() ? std::vector<Entry>() : then->second[i];
      lane.answered = lane.applied = 0;
      for (size_t k = 0; k < lane.log.size(); ++k) {
        if (lane.log[k].answered) lane.answered = k + 1;
        to_send[session->client].erase(lane.log[k].item.number);
      }
    }
  }
  for (const auto& [client, items] : to_send) {
    for (const auto& [number, item] : items) clients_[client].pending.push_back(item);
  }
}

void Schedule::KillStreams() {
  for (const auto& orphan : orphans_) orphan->Die();
  orphans_.clear();
  for (auto& [id, session] : sessions_) {
    for (LaneState& lane : session->lanes) {
      if (lane.stream != nullptr) lane.stream->Die();
      lane.stream = nullptr;
    }
  }
}

void Schedule::KillStreamsOf(int32_t replica) {
  const auto is_there = [replica](const std::shared_ptr<SimStream>& stream) {
    return stream != nullptr && stream->replica() == replica;
  };
  for (const auto& orphan : orphans_) {
    if (is_there(orphan)) orphan->Die();
  }
  std::erase_if(orphans_, is_there);
  for (auto& [id, session] : sessions_) {
    for (LaneState& lane : session->lanes) {
      if (!is_there(lane.stream)) continue;
      lane.stream->Die();
      lane.stream = nullptr;
    }
  }
}

// With the trainer's own, between its calls.
void Schedule::SaveCheckpoint() {
  if (phase_ != Phase::kIdle || LostServer() || server_->head() == nullptr) return;
  if (EndLostEpoch()) return;
  Count("checkpoint");
  Say("SaveCheckpoint");
  absl::Status status;
  const std::string tag = random_.OneIn(2) ? "s" : "t";
  const int64_t replays = replays_;
  RunCall([&, progress = progress_] {
    status = server_->engine().SaveCheckpoint(kHead, tag).status();
    if (status.ok()) saved_[newest_ = tag] = {progress, TakeLogs()};
  });
  if (EndLostEpoch()) return;
  const bool lost = ReplicaWasLost(status) || replays_ != replays;  // the head, in the middle of it
  if (!status.ok() && !lost) Diverge(absl::StrCat("SaveCheckpoint: ", Text(status)));
}

// RestoreCheckpoint while the server runs.
void Schedule::RestoreInPlace() {
  if (saved_.empty() || LostServer() || server_->head() == nullptr) return;
  if (EndLostEpoch()) return;
  const std::string tag = std::next(saved_.begin(), random_.Below(static_cast<int>(saved_.size())))->first;
  // That of a drain has no name of its own.
  if (tag == engine::kDrainTag && newest_ != tag) return;
  const bool under_way = half_write_.has_value() && half_write_->fate == HalfWrite::Fate::kUnderWay;
  if (under_way && EndDoomedEpoch()) return;
  Count("restore");
  Say("RestoreCheckpoint");
  if (under_way && server_->replicas() == nullptr && random_.OneIn(2)) CommitDuringRestore();
  absl::Status status;
  const std::string named = tag == newest_ ? "" : tag;
  RunCall([&] {
    restored_ = tag;  // where that changes anything
    status = server_->engine().RestoreCheckpoint(kHead, named).status();
  });
  if (EndLostEpoch()) return;
  if (ReplicaWasLost(status)) return;
  if (!status.ok()) Diverge(absl::StrCat("RestoreCheckpoint: ", Text(status)));
  if (under_way) UndoWrite();
}

void Schedule::Drain() {
  if (server_->replicas() != nullptr) return;
  if (LostServer() || server_->head() == nullptr) return;
  if (EndDoomedEpoch()) return;
  Count("drain");
  Say("SIGTERM");
  ForgetWrite();
  ending_.begun = nullptr;
  ending_.stepped = nullptr;
  // A step that waits for its turn takes it before the server goes.
  const absl::Status status = server_->Drain([this] { KillStreams(); });
  if (!status.ok()) return Diverge(absl::StrCat("drained and restarted: ", Text(status)));
  if (Incarnations() != incarnations_) Diverge("a drained server has another incarnation");
  // Now it is the drain's that a killed server would start with.
  newest_ = engine::kDrainTag;
  saved_.erase(newest_);
  if (phase_ == Phase::kIdle) saved_[newest_] = {progress_, TakeLogs()};
}

void Schedule::Kill() {
  if (server_->replicas() != nullptr) return KillReplica(AnyReplica());
  if (!MayLoseServer()) return;
  Count("kill");
  Say("kill -9");
  Restart();
}

// Not if the newest checkpoint is one of a drain, of which nobody knows what it belongs to.
bool Schedule::MayLoseServer() const { return newest_.empty() || saved_.contains(newest_); }

void Schedule::Restart() {
  ForgetWrite();
  KillStreams();
  ending_.begun = nullptr;
  ending_.stepped = nullptr;
  restored_ = newest_;
  const auto after = rank_random_.OneIn(2) ? SimServer::OtherRank::kLivesOn : SimServer::OtherRank::kDies;
  if (const absl::Status status = server_->Kill(after); !status.ok()) {
    Diverge(absl::StrCat("killed and restarted: ", Text(status)));
  }
}

absl::Status Schedule::TryToDelete(engine::Head::DiscardGradient discard) {
  absl::Status deleted;
  const auto call = [&] { deleted = server_->engine().DeleteHead(kHead, discard); };
  // The engine of a single device does not wait.
  if (server_->replicas() == nullptr) {
    call();
  } else if (discard == engine::Head::DiscardGradient::kYes) {
    RunCall(call);
  } else {
    server_->Run(call);
  }
  return deleted;
}

void Schedule::DeleteHead() {
  if (phase_ != Phase::kIdle || LostServer() || server_->head() == nullptr) return;
  if (EndDoomedEpoch()) return;
  Count("head deleted");
  Say("DeleteHead");
  const bool holds = !WindowMarks().empty();
  const absl::Status kept = TryToDelete(engine::Head::DiscardGradient::kNo);
  if (kept.ok() == holds) return Diverge(absl::StrCat("DeleteHead without discarding: ", Text(kept)));
  const absl::Status deleted = holds ? TryToDelete(engine::Head::DiscardGradient::kYes) : kept;
  if (!deleted.ok() && !ReplicaWasLost(deleted)) return Diverge(absl::StrCat("DeleteHead: ", Text(deleted)));
  if (server_->replicas() != nullptr) SettleSet();
  if (server_->head() != nullptr) return;  // it has come to nothing
  saved_.clear();
  newest_.clear();
  ForgetWrite();
  version_ = server_->Create(progress_.weights);
  versions_.clear();
  versions_[version_] = progress_.weights;
  // Sessions went with the head, and with them whoever could name one of a past of the new head's name.
  old_call_.reset();
  pasts_.clear();
  Replay(progress_);
}

// The trainer's own weights: everything added to them at once.
void Schedule::WriteWeights() {
  if (phase_ != Phase::kIdle || LostServer() || server_->head() == nullptr) return;
  if (EndDoomedEpoch()) return;
  Count("weights written");
  for (float& value : progress_.weights.matrix) value += static_cast<float>(random_.Below(3) - 1);
  // This takes the place of another write that is under way.
  if (half_write_.has_value() && half_write_->fate == HalfWrite::Fate::kUnderWay) ForgetWrite();
  const uint64_t version = server_->Create(progress_.weights);
  if (version != version_ + 1) Diverge(absl::StrCat("weights ", version, " after ", version_));
  version_ = version;
  versions_[version_] = progress_.weights;
}

}  // namespace lossd::simulation
