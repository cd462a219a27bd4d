#include "server/engine/common/retry_slots.h"

#include <algorithm>

namespace lossd::engine {

absl::Duration RetrySlots::Next(absl::Time now) {
  const MutexLock lock(mutex_);
  last_ = std::clamp(last_ + kApart, now + kShortest, now + kLongest);
  return last_ - now;
}

}  // namespace lossd::engine
