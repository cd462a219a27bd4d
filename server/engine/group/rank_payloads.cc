#include "server/engine/group/rank_payloads.h"

#include <utility>

namespace lossd::engine {

void RankPayload::Answer(ResultBytes dx) {
  const MutexLock lock(mutex_);
  dx_ = std::move(dx);
}

ResultBytes RankPayload::dx() const {
  const MutexLock lock(mutex_);
  return dx_;
}

uint64_t RankPayloads::Add(std::shared_ptr<RankPayload> payload) {
  const MutexLock lock(mutex_);
  payloads_[++last_number_] = std::move(payload);
  return last_number_;
}

std::shared_ptr<RankPayload> RankPayloads::Find(uint64_t number) const {
  const MutexLock lock(mutex_);
  const auto found = payloads_.find(number);
  return found == payloads_.end() ? nullptr : found->second;
}

// Memory is given back without the lock.
void RankPayloads::Release(uint64_t number) {
  decltype(payloads_)::node_type released;
  const MutexLock lock(mutex_);
  released = payloads_.extract(number);
}

int64_t RankPayloads::count() const {
  const MutexLock lock(mutex_);
  return static_cast<int64_t>(payloads_.size());
}

}  // namespace lossd::engine
