// std::mutex with clang's thread-safety annotations: what is ABSL_GUARDED_BY a Mutex is touched only with it
// held, or clang-tidy refuses the file (-Wthread-safety).
//
// absl::Mutex has the same annotations, but the one that distributions package is compiled without
// ThreadSanitizer, which would then report races where there are none.
#ifndef LOSSD_SERVER_ENGINE_COMMON_MUTEX_H_
#define LOSSD_SERVER_ENGINE_COMMON_MUTEX_H_

#include <mutex>

#include "absl/base/thread_annotations.h"

namespace lossd::engine {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// Holds `mutex` for as long as it lives.
class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_MUTEX_H_
