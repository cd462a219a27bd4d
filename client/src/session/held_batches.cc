#include "client/src/session/held_batches.h"

#include <algorithm>

namespace lossd::internal {

void HeldBatches::Note(const std::string& session, uint64_t number, int64_t bytes, bool all, int64_t limit) {
  if (session != session_) {
    session_ = session;
    batches_.clear();
    bytes_ = 0;
  }
  std::erase_if(batches_, [&](const Batch& batch) {
    if (batch.number != number) return false;
    bytes_ -= batch.bytes;
    return true;
  });
  if (bytes == 0) return;
  batches_.push_back({number, bytes, all});
  bytes_ += bytes;
  while (bytes_ > limit && batches_.size() > 1) {
    bytes_ -= batches_.front().bytes;
    batches_.pop_front();
  }
}

bool HeldBatches::HasAll(const std::string& session, uint64_t number) const {
  return session == session_ && std::any_of(batches_.begin(), batches_.end(), [number](const Batch& batch) {
           return batch.number == number && batch.all;
         });
}

}  // namespace lossd::internal
