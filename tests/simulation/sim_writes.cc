// The simulated trainer's weights on their way in, row by row, while other things happen to the head.
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/random_id.h"
#include "tests/simulation/schedule.h"

namespace lossd::simulation {
namespace {

constexpr int64_t kHalf = kVocab / 2;

}  // namespace

void Schedule::StageWrite() {
  if (server_->head() == nullptr) return;
  if (half_write_.has_value()) return EndWrite();
  if (phase_ != Phase::kIdle || LostServer()) return;
  HalfWrite write{.id = {}, .weights = progress_.weights};
  for (float& value : write.weights.matrix) value += static_cast<float>(random_.Below(3) - 1);
  const auto id = server_->head()->BeginWrite("halves", engine::Head::Replace::kYes, engine::RandomId());
  if (!id.ok()) return Diverge(absl::StrCat("BeginWrite: ", Text(id.status())));
  write.id = *id;
  const absl::Status rows = server_->WriteRows(write.id, write.weights, 0, kHalf);
  if (!rows.ok()) return Diverge(absl::StrCat("the first rows of a write: ", Text(rows)));
  Count("write begun");
  Say(absl::StrCat("BeginWrite: ", write.id));
  half_write_ = std::move(write);
}

// Whether or not the trainer has heard by now of what happened to the head.
void Schedule::EndWrite() {
  const bool under_way = half_write_->fate == HalfWrite::Fate::kUnderWay;
  if (under_way && (phase_ != Phase::kIdle || LostServer())) return;
  if (EndDoomedEpoch()) return;
  // Whatever was, replicas publish nothing while they end a window.
  const bool ends = server_->head()->Info().window_state != engine::WindowState::kOpen;
  if (server_->replicas() != nullptr && ends) return;
  const HalfWrite write = *std::exchange(half_write_, std::nullopt);
  Say(absl::StrCat("CommitWrite: ", write.id));
  const absl::Status rows = server_->WriteRows(write.id, write.weights, kHalf, kHalf);
  absl::StatusOr<uint64_t> version = absl::UnknownError("no answer");
  const auto commit = [&] {
    if (server_->replicas() != nullptr && write.fate == HalfWrite::Fate::kUnderWay) {
      version = CommitThroughLosses(write);
      return;
    }
    server_->head()->CommitWrite(write.id,
                                 [&](const absl::StatusOr<uint64_t>& published) { version = published; });
    if (server_->replicas() == nullptr) server_->WaitIdle();
  };
  const int64_t replays = replays_;
  commit();
  if (replays_ != replays || !SameServer()) return;  // it is lost
  if (write.fate == HalfWrite::Fate::kForgotten) {
    Count("write forgotten");
    if (!absl::IsNotFound(rows) || !absl::IsNotFound(version.status())) {
      Diverge(absl::StrCat("a write nobody knows: ", Text(rows), "; ", Text(version.status())));
    }
    return;
  }
  if (write.fate == HalfWrite::Fate::kUndone) {
    CheckUndone("the rest of a write", rows);
    return CheckUndone("the commit of a write", version.status());
  }
  if (!rows.ok() || !version.ok() || *version != version_ + 1) {
    return Diverge(absl::StrCat("the end of a write at weights ", version_, ": ", Text(rows), "; ",
                                version.ok() ? absl::StrCat(*version) : Text(version.status())));
  }
  Count("write ended");
  progress_.weights = write.weights;
  version_ = *version;
  versions_[version_] = progress_.weights;
  commit();
  if (!version.ok() || *version != version_) Diverge("CommitWrite, repeated, answers something else");
  if (!(server_->Weights() == progress_.weights)) Diverge("the weights written are others");
}

absl::StatusOr<uint64_t> Schedule::CommitThroughLosses(const HalfWrite& write) {
  absl::StatusOr<uint64_t> version = absl::UnavailableError("not yet");
  const int64_t replays = replays_;
  const auto is_lost = [&] { return replays_ != replays || !SameServer(); };
  while (absl::IsUnavailable(version.status()) && !is_lost() && !Diverged()) {
    const auto answer = std::make_shared<std::optional<absl::StatusOr<uint64_t>>>();
    server_->head()->CommitWrite(
        write.id, [answer](const absl::StatusOr<uint64_t>& published) { *answer = published; });
    committing_ = true;
    maybe_published_[version_ + 1] = write.weights;
    GoOnUntil([&] { return answer->has_value() || is_lost(); });
    committing_ = false;
    if (answer->has_value()) version = **answer;
    if (!version.ok()) Count("write interrupted");
    if (!is_lost()) SettleSet();
  }
  return version;
}

void Schedule::CommitDuringRestore() {
  const HalfWrite write = *std::exchange(half_write_, std::nullopt);
  const absl::Status rows = server_->WriteRows(write.id, write.weights, kHalf, kHalf);
  if (!rows.ok()) return Diverge(absl::StrCat("the rest of a write: ", Text(rows)));
  Say(absl::StrCat("CommitWrite in the middle of it: ", write.id));
  server_->gate().on_write_state = [this, id = write.id] {
    server_->head()->CommitWrite(id, [this](const absl::StatusOr<uint64_t>& version) {
      CheckUndone("a commit in the middle of a restore", version.status());
    });
  };
}

void Schedule::CheckUndone(absl::string_view what, const absl::Status& status) {
  Count("write undone");
  if (!absl::IsAborted(status)) Diverge(absl::StrCat(what, " that was undone: ", Text(status)));
}

void Schedule::UndoWrite() {
  const bool under_way = half_write_.has_value() && half_write_->fate == HalfWrite::Fate::kUnderWay;
  if (under_way) half_write_->fate = HalfWrite::Fate::kUndone;
}

// By a server, or a head, that is another one.
void Schedule::ForgetWrite() {
  if (half_write_.has_value()) half_write_->fate = HalfWrite::Fate::kForgotten;
}

}  // namespace lossd::simulation
