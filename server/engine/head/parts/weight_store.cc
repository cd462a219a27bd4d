#include "server/engine/head/parts/weight_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

// Ids of undone writes that a head can still tell from unknown ones: a restore undoes two at most.
constexpr size_t kMostUndoneWrites = 16;

}  // namespace

absl::Status WeightStore::CheckPresent() const {
  if (version_ > 0) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, "head",
                   absl::StrCat("head ", head_, " has no weights yet"));
}

absl::Status WeightStore::CheckVersion(uint64_t version, absl::string_view field) const {
  if (absl::Status present = CheckPresent(); !present.ok()) return present;
  if (version == 0 || version == version_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kWeightVersion, field,
                   absl::StrCat(field, " is ", version, "; the weights of head ", head_, " are of version ",
                                version_, ", and no others are kept (0 takes them, whichever they are)"));
}

void WeightStore::NoteStep() {
  ++version_;
  ++optimizer_steps_;
}

absl::StatusOr<std::string> WeightStore::Admit(const std::string& write_key, Replace replace) const {
  if (staged_ == nullptr) return std::string();
  if (staged_->key() == write_key) return staged_->id();
  if (replace == Replace::kYes && !publishing_) return std::string();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kWeightWrite, "write_key",
                   absl::StrCat("write_key is '", write_key, "'; a write with another key is ",
                                publishing_ ? "being published (begin this one when it is)"
                                            : "under way (set replace to drop it)"));
}

absl::StatusOr<std::shared_ptr<StagedWrite>> WeightStore::Find(const std::string& write_id) const {
  if (staged_ == nullptr || staged_->id() != write_id) return NoWrite(write_id);
  return staged_;
}

std::shared_ptr<StagedWrite> WeightStore::Drop(const std::optional<std::string>& write_id) {
  if (staged_ == nullptr || publishing_) return nullptr;
  if (write_id.has_value() && staged_->id() != *write_id) return nullptr;
  return std::exchange(staged_, nullptr);
}

absl::Status WeightStore::CheckNoWrite() const {
  if (staged_ == nullptr) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kWeightWrite, "head",
                   absl::StrCat("a write of head ", head_, " is under way (", staged_->rows(),
                                " rows have arrived), which would replace what is made now: commit it, or "
                                "write or load the weights anew, which drops it, and ask again"));
}

std::optional<uint64_t> WeightStore::VersionOf(const std::string& write_id) const {
  if (write_id.empty() || write_id != last_committed_write_) return std::nullopt;
  return last_committed_version_;
}

uint64_t WeightStore::NoteWrite(std::string write_id) {
  last_committed_write_ = std::move(write_id);
  last_committed_version_ = ++version_;
  return version_;
}

WeightStore::Commit WeightStore::BeginCommit(const std::string& write_id, CommitCallback& done) {
  if (const auto version = VersionOf(write_id); version.has_value()) return {*version, nullptr};
  if (staged_ == nullptr || staged_->id() != write_id) return {NoWrite(write_id), nullptr};
  if (!publishing_) {
    if (absl::Status complete = staged_->CheckComplete(); !complete.ok()) return {complete, nullptr};
  }
  waiters_.push_back(std::move(done));
  return {std::nullopt, std::exchange(publishing_, true) ? nullptr : staged_};
}

std::vector<CommitCallback> WeightStore::EndCommit(const absl::Status& published,
                                                   absl::StatusOr<uint64_t>* answer) {
  if (published.ok()) {
    *answer = NoteWrite(staged_->id());
  } else {
    *answer = published;
  }
  publishing_ = false;
  staged_ = nullptr;
  return std::exchange(waiters_, {});
}

WeightStore::Undone WeightStore::UndoWrites() {
  Undone undone;
  NoteUndone(last_committed_write_);
  undone.staged = std::exchange(staged_, nullptr);
  if (undone.staged == nullptr) return undone;
  NoteUndone(undone.staged->id());
  undone.status = NoWrite(undone.staged->id());
  undone.waiters = std::exchange(waiters_, {});
  publishing_ = false;
  return undone;
}

void WeightStore::Install(State state) {
  version_ = state.version;
  optimizer_steps_ = state.optimizer_steps;
  last_committed_write_ = std::move(state.last_committed_write);
  last_committed_version_ = state.last_committed_version;
}

// Why a write is not under way: it never was, or a restore has undone it.
absl::Status WeightStore::NoWrite(const std::string& write_id) const {
  if (std::find(undone_.begin(), undone_.end(), write_id) != undone_.end()) {
    return MakeError(
        absl::StatusCode::kAborted, RejectReason::kWeightWrite, "write_id",
        absl::StrCat("write ", write_id, " was undone: head ", head_,
                     " was restored from a checkpoint since it began; if these weights are still "
                     "wanted, begin another write or load, of every row"));
  }
  return MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownWrite, "write_id",
                   absl::StrCat("write_id is '", write_id, "'; no such write of head ", head_,
                                " is under way: another write or load that began since has dropped it, or "
                                "the server was started anew; begin another"));
}

void WeightStore::NoteUndone(const std::string& write_id) {
  if (write_id.empty()) return;
  undone_.push_back(write_id);
  if (undone_.size() > kMostUndoneWrites) undone_.pop_front();
}

}  // namespace lossd::engine
