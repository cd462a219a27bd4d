#include "server/engine/schedule/session_credit.h"

#include <utility>

namespace lossd::engine {

bool SessionCredit::MayTake(const void* who, Waiter waiter) {
  const MutexLock lock(mutex_);
  if (taken_ < limit_) return true;
  waiters_.insert_or_assign(who, std::move(waiter));
  return false;
}

void SessionCredit::Forget(const void* who) {
  const MutexLock lock(mutex_);
  waiters_.erase(who);
}

void SessionCredit::Take(int64_t bytes) {
  *total_ += bytes;
  const MutexLock lock(mutex_);
  taken_ += bytes;
}

std::vector<SessionCredit::Waiter> SessionCredit::Return(int64_t bytes) {
  *total_ -= bytes;
  const MutexLock lock(mutex_);
  taken_ -= bytes;
  if (taken_ >= limit_) return {};
  std::vector<Waiter> woken;
  for (auto& [who, waiter] : waiters_) woken.push_back(std::move(waiter));
  waiters_.clear();
  return woken;
}

}  // namespace lossd::engine
