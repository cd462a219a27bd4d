#include "server/engine/session_credit.h"

#include <utility>

namespace lossd::engine {

bool SessionCredit::MayTake(Waiter waiter) {
  const std::lock_guard lock(mutex_);
  if (taken_ < limit_) return true;
  waiters_.push_back(std::move(waiter));
  return false;
}

void SessionCredit::Take(int64_t bytes) {
  *total_ += bytes;
  const std::lock_guard lock(mutex_);
  taken_ += bytes;
}

std::vector<SessionCredit::Waiter> SessionCredit::Return(int64_t bytes) {
  *total_ -= bytes;
  const std::lock_guard lock(mutex_);
  taken_ -= bytes;
  if (taken_ >= limit_) return {};
  return std::exchange(waiters_, {});
}

}  // namespace lossd::engine
