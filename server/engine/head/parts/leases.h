// A count of leases of a head's weights: chunks of its students, or blends that read it.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_LEASES_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_LEASES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/mutex.h"

namespace lossd::engine {

// Thread-safe.
class Leases : public std::enable_shared_from_this<Leases> {
 public:
  // Takes a lease, which ends with the last copy of the returned pointer.
  std::shared_ptr<const void> Take() ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    ++taken_;
    return std::shared_ptr<const void>(nullptr, [self = shared_from_this()](const void*) { self->End(); });
  }
  int64_t taken() const ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    return taken_;
  }
  // Calls `then` when no lease is left, perhaps at once, or at EndWaits. The thread that ends the last lease
  // may hold the lock of a head, so `then` must not take one.
  void WhenNone(std::function<void()> then) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      const MutexLock lock(mutex_);
      if (taken_ > 0) return waiting_.push_back(std::move(then));
    }
    then();
  }
  // Calls every waiting `then`, though leases may be left.
  void EndWaits() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::vector<std::function<void()>> waiting;
    {
      const MutexLock lock(mutex_);
      waiting.swap(waiting_);
    }
    for (const std::function<void()>& then : waiting) then();
  }

 private:
  void End() ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      const MutexLock lock(mutex_);
      if (--taken_ > 0) return;
    }
    EndWaits();
  }

  mutable Mutex mutex_;
  int64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_LEASES_H_
