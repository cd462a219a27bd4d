// std::mutex with clang's thread-safety annotations: what is ABSL_GUARDED_BY a Mutex is touched only with it
// held, or clang-tidy refuses the file (-Wthread-safety). Every mutex of the server is one.
//
// absl::Mutex has the same annotations, but the one that distributions package is compiled without
// ThreadSanitizer, which would then report races where there are none.
#ifndef LOSSD_SERVER_ENGINE_COMMON_MUTEX_H_
#define LOSSD_SERVER_ENGINE_COMMON_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"

namespace lossd::engine {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class CondVar;
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

// Waits with a Mutex held, which others may hold meanwhile. It takes no predicate, because the analysis does
// not know that a lambda runs under the lock: callers wait in a loop that looks at what is guarded.
class CondVar {
 public:
  void Wait(Mutex& mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    (void)lock.release();  // the caller goes on holding it
  }
  std::cv_status WaitUntil(Mutex& mutex, std::chrono::steady_clock::time_point time)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const std::cv_status status = condition_.wait_until(lock, time);
    (void)lock.release();
    return status;
  }
  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_MUTEX_H_
