// What happens to a simulated server: checkpoints, drains, kills, heads deleted, weights written.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "tests/simulation/schedule.h"

namespace lossd::simulation {

// A trainer whose server is another one, or an earlier one, hears so whatever it asks, and replays.
bool Schedule::LostServer() {
  const std::shared_ptr<engine::Head> head = server_->head();
  if (server_->engine().incarnation() == incarnation_ && head != nullptr && head->restores() == restores_) {
    return false;
  }
  for (const ClientState& client : clients_) {
    if (client.session == nullptr || client.session->incarnation == server_->engine().incarnation()) continue;
    const auto found = server_->engine().FindSession(client.session->id, client.session->incarnation);
    if (engine::ReasonOf(found.status()) != engine::RejectReason::kIncarnation) {
      Diverge(absl::StrCat("a session of another incarnation: ", Text(found.status())));
    }
  }
  if (head == nullptr) {
    // Nothing was restored: the trainer has the weights.
    versions_.clear();
    version_ = server_->Create(progress_.weights);
    versions_[version_] = progress_.weights;
    Replay(progress_);
  } else {
    const Progress progress = *saved_;
    // In one incarnation no version is given to two weights.
    if (server_->engine().incarnation() != incarnation_) versions_.clear();
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
  const std::shared_ptr<engine::Head> head = server_->head();
  incarnation_ = server_->engine().incarnation();
  restores_ = head->restores();
  progress_ = progress;
  const engine::HeadInfo info = head->Info();
  Say(absl::StrCat("the trainer replays from generation ", info.generation));
  for (auto& [id, session] : sessions_) {
    for (size_t lane = 0; lane < session->lanes.size(); ++lane) {
      Orphan(session->lanes[lane]);  // of an earlier time
      const uint64_t mark = MarkOf(info.window_marks, id, static_cast<int32_t>(lane));
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

// With the trainer's own, between its calls.
void Schedule::SaveCheckpoint() {
  if (phase_ != Phase::kIdle || LostServer() || server_->head() == nullptr) return;
  Count("checkpoint");
  Say("SaveCheckpoint");
  absl::Status status;
  server_->Run([&] { status = server_->engine().SaveCheckpoint(kHead, "t").status(); });
  if (!status.ok()) return Diverge(absl::StrCat("SaveCheckpoint: ", Text(status)));
  saved_ = progress_;
}

// RestoreCheckpoint while the server runs.
void Schedule::RestoreInPlace() {
  if (!saved_.has_value() || server_->head() == nullptr || LostServer()) return;
  Count("restore");
  Say("RestoreCheckpoint");
  const bool under_way = half_write_.has_value() && half_write_->fate == HalfWrite::Fate::kUnderWay;
  if (under_way && random_.OneIn(2)) CommitDuringRestore();
  absl::Status status;
  server_->Run([&] { status = server_->engine().RestoreCheckpoint(kHead, "").status(); });
  if (!status.ok()) Diverge(absl::StrCat("RestoreCheckpoint: ", Text(status)));
  if (under_way && half_write_.has_value()) half_write_->fate = HalfWrite::Fate::kUndone;
}

void Schedule::Drain() {
  if (LostServer() || server_->head() == nullptr) return;
  Count("drain");
  Say("SIGTERM");
  ForgetWrite();
  ending_.begun = nullptr;
  ending_.stepped = nullptr;
  // A step that waits for its turn takes it before the server goes.
  const absl::Status status = server_->Drain([this] { KillStreams(); });
  if (!status.ok()) return Diverge(absl::StrCat("drained and restarted: ", Text(status)));
  if (server_->engine().incarnation() != incarnation_) Diverge("a drained server has another incarnation");
  // Now it is the drain's that a killed server would start with.
  saved_.reset();
  if (phase_ == Phase::kIdle) saved_ = progress_;
}

void Schedule::Kill() {
  // The newest checkpoint may be one of a drain.
  if (!saved_.has_value() && outcome_.events.contains("drain")) return;
  Count("kill");
  Say("kill -9");
  ForgetWrite();
  KillStreams();
  ending_.begun = nullptr;
  ending_.stepped = nullptr;
  if (const absl::Status status = server_->Kill(); !status.ok()) {
    Diverge(absl::StrCat("killed and restarted: ", Text(status)));
  }
}

void Schedule::DeleteHead() {
  if (phase_ != Phase::kIdle || LostServer() || server_->head() == nullptr) return;
  Count("head deleted");
  Say("DeleteHead");
  engine::Engine& engine = server_->engine();
  const bool holds = !server_->head()->Info().window_marks.empty();
  const absl::Status kept = engine.DeleteHead(kHead, engine::Head::DiscardGradient::kNo);
  if (kept.ok() == holds) return Diverge(absl::StrCat("DeleteHead without discarding: ", Text(kept)));
  if (holds && !engine.DeleteHead(kHead, engine::Head::DiscardGradient::kYes).ok()) Diverge("DeleteHead");
  saved_.reset();
  ForgetWrite();
  version_ = server_->Create(progress_.weights);
  versions_.clear();
  versions_[version_] = progress_.weights;
  // Sessions went with the head.
  old_call_.reset();
  Replay(progress_);
}

// The trainer's own weights: everything added to them at once.
void Schedule::WriteWeights() {
  if (phase_ != Phase::kIdle || LostServer() || server_->head() == nullptr) return;
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
