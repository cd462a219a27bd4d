// Weights of a head in and out: staged writes, published between batches, and reads.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

// Ids of undone writes that a head can still tell from unknown ones: a restore undoes two at most.
constexpr size_t kMostUndoneWrites = 16;

absl::Status UnknownWrite(const std::string& write_id) {
  return MakeError(absl::StatusCode::kNotFound, RejectReason::kUnknownWrite, "write_id",
                   absl::StrCat("write_id is '", write_id, "'; no such write is under way, call BeginWrite"));
}

}  // namespace

// Why a write is not under way: it never was, or a restore has undone it.
absl::Status Head::NoWriteLocked(const std::string& write_id) const {
  if (std::find(undone_writes_.begin(), undone_writes_.end(), write_id) == undone_writes_.end()) {
    return UnknownWrite(write_id);
  }
  return MakeError(absl::StatusCode::kAborted, RejectReason::kWeightWrite, "write_id",
                   absl::StrCat("write ", write_id, " was undone: head ", config_.name,
                                " was restored from a checkpoint since it began; if these weights are still "
                                "wanted, begin another write or load, of every row"));
}

void Head::NoteUndoneLocked(const std::string& write_id) {
  if (write_id.empty()) return;
  undone_writes_.push_back(write_id);
  if (undone_writes_.size() > kMostUndoneWrites) undone_writes_.pop_front();
}

uint64_t Head::weight_version() const {
  const std::lock_guard lock(mutex_);
  return weight_version_;
}

absl::StatusOr<std::string> Head::BeginWrite(const std::string& write_key, Replace replace,
                                             const std::string& new_write_id) {
  // Writers that share a key all come at once: the reservation covers the buffer of the first, not one of
  // each.
  const std::lock_guard making(begin_write_mutex_);
  std::shared_ptr<StagedWrite> dropped;  // its buffer goes after the lock is released
  const auto admit = [&]() -> absl::StatusOr<std::string> {
    if (!ended_.ok()) return ended_;
    if (staged_ == nullptr) return std::string();
    if (staged_->key() == write_key) return staged_->id();
    if (replace == Replace::kYes && !publishing_) return std::string();
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kWeightWrite, "write_key",
                     absl::StrCat("write_key is '", write_key,
                                  "'; a write with another key is under way (set replace to drop it)"));
  };
  {
    const std::lock_guard lock(mutex_);
    absl::StatusOr<std::string> id = admit();
    if (!id.ok() || !id->empty()) return id;
    // The reservation covers one staging buffer: the old one goes before the new one comes.
    dropped = std::exchange(staged_, nullptr);
  }
  if (dropped != nullptr) dropped->Take();
  dropped = nullptr;
  absl::StatusOr<HostBuffer> weights = HostBuffer::Create(config_.staged_bytes(), Commit::kNow);
  if (!weights.ok()) return weights.status();
  absl::StatusOr<HostBuffer> bias = HostBuffer::Create(config_.bias_bytes(), Commit::kNow);
  if (!bias.ok()) return bias.status();

  const std::lock_guard lock(mutex_);
  absl::StatusOr<std::string> id = admit();  // the head may have been deleted
  if (!id.ok() || !id->empty()) return id;
  staged_ = std::make_shared<StagedWrite>(new_write_id, write_key, config_,
                                          WeightBuffers{*std::move(weights), *std::move(bias)});
  return staged_->id();
}

absl::StatusOr<std::shared_ptr<StagedWrite>> Head::FindWrite(const std::string& write_id) const {
  const std::lock_guard lock(mutex_);
  if (!ended_.ok()) return ended_;
  if (staged_ == nullptr || staged_->id() != write_id) return NoWriteLocked(write_id);
  return staged_;
}

void Head::DropWrite(const std::string& write_id) {
  // The next one's buffer comes after this one's has gone: the reservation covers one.
  const std::lock_guard making(begin_write_mutex_);
  std::shared_ptr<StagedWrite> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (staged_ == nullptr || staged_->id() != write_id || publishing_) return;
    dropped = std::exchange(staged_, nullptr);
  }
  dropped->Take();
}

void Head::CommitWrite(const std::string& write_id, CommitCallback done) {
  absl::StatusOr<uint64_t> answer = uint64_t{0};
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) {
      answer = ended_;
    } else if (!write_id.empty() && write_id == last_committed_write_) {
      answer = last_committed_version_;
    } else if (staged_ == nullptr || staged_->id() != write_id) {
      answer = NoWriteLocked(write_id);
    } else if (publishing_) {
      publish_waiters_.push_back(std::move(done));
      return;
    } else if (absl::Status complete = staged_->CheckComplete(); !complete.ok()) {
      answer = complete;
    } else {
      publishing_ = true;
      publish_waiters_.push_back(std::move(done));
      PostLastLocked(std::nullopt, [self = shared_from_this(), staged = staged_] { self->Publish(staged); });
      return;
    }
  }
  done(std::move(answer));
}

void Head::Publish(const std::shared_ptr<StagedWrite>& staged) {
  absl::StatusOr<uint64_t> answer = uint64_t{0};
  {
    const std::lock_guard lock(mutex_);
    if (staged_ != staged) return;  // a restore came first: it has dropped the write and told who waited
    if (!ended_.ok()) answer = ended_;
  }
  if (answer.ok()) {
    const absl::Status published = backend_->PublishWeights(staged->Take());
    if (!published.ok()) {
      EndByFailure(published);
      answer = published;
    }
  }
  std::vector<CommitCallback> waiters;
  {
    const std::lock_guard lock(mutex_);
    if (answer.ok()) {
      answer = ++weight_version_;
      last_committed_write_ = staged->id();
      last_committed_version_ = weight_version_;
      ++environment_.counters->weight_versions;
    }
    publishing_ = false;
    staged_ = nullptr;
    waiters = std::exchange(publish_waiters_, {});
  }
  for (const auto& waiter : waiters) waiter(answer);
}

void Head::ReadWeights(int64_t first_row, int64_t rows, kernels::DataType type, RowsOut out,
                       std::function<void(absl::StatusOr<uint64_t>)> done) {
  environment_.scheduler->Post(
      this, [self = shared_from_this(), first_row, rows, type, out, done = std::move(done)] {
        uint64_t version = 0;
        {
          const std::lock_guard lock(self->mutex_);
          if (!self->ended_.ok()) return done(self->ended_);
          version = self->weight_version_;
        }
        if (version == 0) {
          return done(MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, "head",
                                absl::StrCat("head ", self->config_.name, " has no weights yet")));
        }
        absl::Status status = self->backend_->ReadWeightRows(first_row, rows, type, out.matrix);
        if (status.ok() && out.bias != nullptr && self->config_.bias) {
          status = self->backend_->ReadBias(first_row, rows, out.bias);
        }
        if (!status.ok()) {
          self->EndByFailure(status);
          return done(status);
        }
        done(version);
      });
}

}  // namespace lossd::engine
