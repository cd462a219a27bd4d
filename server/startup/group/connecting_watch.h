// Ends a rank that does not get through to the others.
#ifndef LOSSD_SERVER_STARTUP_GROUP_CONNECTING_WATCH_H_
#define LOSSD_SERVER_STARTUP_GROUP_CONNECTING_WATCH_H_

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "server/engine/common/mutex.h"

namespace lossd {

// While it lives, this rank is being connected with the others and says hello over their devices: in
// libraries that may wait for ever when memories or networks do not reach each other, though all processes
// are well. If it lives for longer than `timeout`, or for some seconds after `told_to_end` (null: never) has
// said so, the process ends by EndRank.
class ConnectingWatch {
 public:
  ConnectingWatch(absl::Duration timeout, std::function<bool()> told_to_end);
  ~ConnectingWatch();
  ConnectingWatch(const ConnectingWatch&) = delete;
  ConnectingWatch& operator=(const ConnectingWatch&) = delete;

 private:
  void Watch(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::function<bool()> told_to_end_;
  engine::Mutex mutex_;
  engine::CondVar changed_;
  bool connected_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_CONNECTING_WATCH_H_
