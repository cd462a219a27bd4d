// When those that are refused for lack of room are to come back: one after the other, the later the more of
// them there are, so that they never come all at once.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ENGINE_COMMON_RETRY_SLOTS_H_
#define LOSSD_SERVER_ENGINE_COMMON_RETRY_SLOTS_H_

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "server/engine/common/mutex.h"

namespace lossd::engine {

class RetrySlots {
 public:
  static constexpr absl::Duration kShortest = absl::Seconds(1);
  static constexpr absl::Duration kLongest = absl::Seconds(30);
  static constexpr absl::Duration kApart = absl::Milliseconds(20);

  // The delay for the one that is refused now.
  absl::Duration Next(absl::Time now);

 private:
  Mutex mutex_;
  absl::Time last_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_RETRY_SLOTS_H_
