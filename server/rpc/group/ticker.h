// Something that is done again and again, in a thread of its own.
#ifndef LOSSD_SERVER_RPC_GROUP_TICKER_H_
#define LOSSD_SERVER_RPC_GROUP_TICKER_H_

#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/group/group_timing.h"

namespace lossd::rpc {

class Ticker {
 public:
  // Calls `tick` each time that `interval` has passed.
  Ticker(absl::Duration interval, std::function<void()> tick)
      : thread_([this, interval, tick = std::move(tick)] {
          while (Await(interval)) tick();
        }) {}
  // Waits for a call that is under way.
  ~Ticker() {
    {
      const engine::MutexLock lock(mutex_);
      stop_ = true;
      stopped_.NotifyAll();
    }
    thread_.join();
  }
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;

 private:
  // False: it is the end.
  bool Await(absl::Duration interval) ABSL_LOCKS_EXCLUDED(mutex_) {
    const auto next = DeadlineAfter(interval);
    const engine::MutexLock lock(mutex_);
    while (!stop_ && stopped_.WaitUntil(mutex_, next) == std::cv_status::no_timeout) {
    }
    return !stop_;
  }

  engine::Mutex mutex_;
  engine::CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the above
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_TICKER_H_
