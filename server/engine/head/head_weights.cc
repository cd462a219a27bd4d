// Weights of a head in and out: staged writes, published between batches, and reads.
#include <utility>

#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

uint64_t Head::weight_version() const {
  const MutexLock lock(mutex_);
  return weights_.version();
}

absl::StatusOr<std::string> Head::AdmitWriteLocked(const std::string& write_key, Replace replace) const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  return weights_.Admit(write_key, replace);
}

absl::StatusOr<std::string> Head::BeginWrite(const std::string& write_key, Replace replace,
                                             const std::string& new_write_id) {
  // Writers that share a key all come at once: the reservation covers the buffer of the first, not one of
  // each.
  const MutexLock making(begin_write_mutex_);
  std::shared_ptr<StagedWrite> dropped;  // its buffer goes after the lock is released
  {
    const MutexLock lock(mutex_);
    absl::StatusOr<std::string> id = AdmitWriteLocked(write_key, replace);
    if (!id.ok() || !id->empty()) return id;
    // The reservation covers one staging buffer: the old one goes before the new one comes.
    dropped = weights_.Drop();
  }
  if (dropped != nullptr) dropped->Take();
  dropped = nullptr;
  absl::StatusOr<HostBuffer> weights = HostBuffer::Create(config_.staged_bytes(), Commit::kNow);
  if (!weights.ok()) return weights.status();
  absl::StatusOr<HostBuffer> bias = HostBuffer::Create(config_.bias_bytes(), Commit::kNow);
  if (!bias.ok()) return bias.status();

  const MutexLock lock(mutex_);
  absl::StatusOr<std::string> id = AdmitWriteLocked(write_key, replace);  // the head may have been deleted
  if (!id.ok() || !id->empty()) return id;
  weights_.Stage(std::make_shared<StagedWrite>(new_write_id, write_key, config_,
                                               WeightBuffers{*std::move(weights), *std::move(bias)}));
  return new_write_id;
}

absl::StatusOr<std::shared_ptr<StagedWrite>> Head::FindWrite(const std::string& write_id) const {
  const MutexLock lock(mutex_);
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  return weights_.Find(write_id);
}

void Head::DropWrite(const std::string& write_id) {
  // The next one's buffer comes after this one's has gone: the reservation covers one.
  const MutexLock making(begin_write_mutex_);
  std::shared_ptr<StagedWrite> dropped;
  {
    const MutexLock lock(mutex_);
    dropped = weights_.Drop(write_id);
  }
  if (dropped != nullptr) dropped->Take();
}

void Head::CommitWrite(const std::string& write_id, CommitCallback done) {
  std::optional<absl::StatusOr<uint64_t>> answer;
  std::shared_ptr<StagedWrite> together;
  {
    const MutexLock lock(mutex_);
    if (!lifecycle_.alive().ok()) {
      answer = lifecycle_.alive();
    } else if (absl::Status may = CheckMayPublishLocked(); !may.ok()) {
      answer = may;
    } else {
      WeightStore::Commit commit = weights_.BeginCommit(write_id, done);
      answer = std::move(commit.answer);
      if (commit.to_publish != nullptr && environment_.publish_together != nullptr) {
        together = std::move(commit.to_publish);
      } else if (commit.to_publish != nullptr) {
        PostPublishLocked(std::move(commit.to_publish));
      }
    }
  }
  if (answer.has_value()) done(*std::move(answer));
  if (together != nullptr) environment_.publish_together(shared_from_this(), std::move(together));
}

void Head::PostPublishLocked(std::shared_ptr<StagedWrite> staged) {
  PostLastLocked({.changes_weights = true},
                 [self = shared_from_this(), staged = std::move(staged)] { self->Publish(staged); });
}

void Head::Publish(const std::shared_ptr<StagedWrite>& staged) {
  absl::Status published;
  std::vector<std::function<void()>> idle;
  bool undone = false;
  {
    const MutexLock lock(mutex_);
    undone = !weights_.IsStaged(staged);  // a restore has dropped the write and told who waited
    if (undone) idle = EndPublishingLocked();
    published = lifecycle_.alive();
  }
  if (undone) {
    for (const auto& waiter : idle) waiter();
    return;
  }
  if (published.ok()) {
    published = backend_->PublishWeights(staged->Take());
    if (!published.ok()) OnDeviceFailure(published);
  }
  absl::StatusOr<uint64_t> answer = uint64_t{0};
  std::vector<CommitCallback> waiters;
  {
    const MutexLock lock(mutex_);
    waiters = weights_.EndCommit(published, &answer);
    if (published.ok()) ++environment_.counters->weight_versions;
    idle = EndPublishingLocked();
  }
  for (const auto& waiter : waiters) waiter(answer);
  for (const auto& waiter : idle) waiter();
}

std::vector<std::function<void()>> Head::EndPublishingLocked() {
  publishing_prepared_ = false;
  return std::exchange(published_waiters_, {});
}

// Over replicas

absl::Status Head::PrepareWrite(const std::string& write_id) {
  const MutexLock lock(mutex_);
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  if (absl::Status may = CheckMayPublishLocked(); !may.ok()) return may;
  CommitCallback nobody = [](const absl::StatusOr<uint64_t>&) {};
  const WeightStore::Commit commit = weights_.BeginCommit(write_id, nobody);
  return commit.answer.has_value() ? commit.answer->status() : absl::OkStatus();
}

void Head::PublishPrepared(CommitCallback done) {
  std::optional<absl::StatusOr<uint64_t>> answer;
  std::vector<CommitCallback> waiters;  // of a head that has ended
  {
    const MutexLock lock(mutex_);
    const std::string id = weights_.committing();
    if (!lifecycle_.alive().ok()) {
      answer = lifecycle_.alive();
      waiters = weights_.TakeWaiters();
    } else if (id.empty()) {
      answer = weights_.version();
    } else {
      (void)weights_.BeginCommit(id, done);
      if (!std::exchange(publishing_prepared_, true)) PostPublishLocked(*weights_.Find(id));
    }
  }
  for (const auto& waiter : waiters) waiter(*answer);
  if (answer.has_value()) done(*std::move(answer));
}

void Head::DropPrepared(const absl::Status& why) {
  std::vector<CommitCallback> waiters;
  {
    const MutexLock lock(mutex_);
    if (publishing_prepared_) return;
    waiters = weights_.TakeWaiters();
    weights_.CancelCommit();
  }
  for (const auto& waiter : waiters) waiter(why);
}

void Head::TellCommitting(const absl::Status& why) {
  std::vector<CommitCallback> waiters;
  {
    const MutexLock lock(mutex_);
    if (publishing_prepared_) return;
    waiters = weights_.TakeWaiters();
  }
  for (const auto& waiter : waiters) waiter(why);
}

void Head::AwaitPublished(std::function<void()> done) {
  {
    const MutexLock lock(mutex_);
    if (publishing_prepared_ && lifecycle_.alive().ok()) {
      published_waiters_.push_back(std::move(done));
      return;
    }
  }
  done();
}

void Head::ReadWeights(int64_t first_row, int64_t rows, kernels::DataType type, RowsOut out,
                       std::function<void(absl::StatusOr<uint64_t>)> done) {
  const bool of_master = config_.master_weights && type != config_.weight_type;
  if (of_master && environment_.place.shared()) {
    return ReadJointWeights({{first_row, rows}, type, out}, std::move(done));
  }
  environment_.scheduler->Post(
      this, [self = shared_from_this(), first_row, rows, type, out, done = std::move(done)] {
        done(self->ReadWeightRows(first_row, rows, type, out));
      });
}

absl::StatusOr<uint64_t> Head::ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type,
                                              RowsOut out) {
  uint64_t version = 0;
  {
    const MutexLock lock(mutex_);
    if (!lifecycle_.alive().ok()) return lifecycle_.alive();
    if (absl::Status weights = weights_.CheckPresent(); !weights.ok()) return weights;
    version = weights_.version();
  }
  absl::Status status = backend_->ReadWeightRows(first_row, rows, type, out.matrix);
  if (status.ok() && out.bias != nullptr && config_.bias) {
    status = backend_->ReadBias(first_row, rows, out.bias);
  }
  if (status.ok()) return version;
  OnDeviceFailure(status);
  return status;
}

}  // namespace lossd::engine
