// Tells threads that wait for something that they should come to an end.
#ifndef LOSSD_CLIENT_SRC_SESSION_INTERRUPTION_H_
#define LOSSD_CLIENT_SRC_SESSION_INTERRUPTION_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace lossd::internal {

// Thread-safe.
class Interruption {
 public:
  void Raise() {
    const std::lock_guard lock(mutex_);
    raised_ = true;
    changed_.notify_all();
  }
  void Clear() {
    const std::lock_guard lock(mutex_);
    raised_ = false;
  }
  bool raised() const {
    const std::lock_guard lock(mutex_);
    return raised_;
  }
  // False if it was raised before or meanwhile.
  bool SleepFor(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return !changed_.wait_for(lock, time, [this] { return raised_; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool raised_ = false;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_INTERRUPTION_H_
