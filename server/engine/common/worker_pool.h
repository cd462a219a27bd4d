// A few threads for work that its caller must not do itself.
#ifndef LOSSD_SERVER_ENGINE_COMMON_WORKER_POOL_H_
#define LOSSD_SERVER_ENGINE_COMMON_WORKER_POOL_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "server/engine/common/mutex.h"
#include "server/engine/common/retry_slots.h"

namespace lossd::engine {

// Thread-safe.
class WorkerPool {
 public:
  // At least one thread.
  explicit WorkerPool(int threads);
  // Runs what was given, then ends.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Never block. Tasks are begun in order, and run side by side. Run takes whatever comes: its caller bounds
  // how many there can be. TryRun, for calls of clients, is RESOURCE_EXHAUSTED while kMostWaiting
  // wait, with a delay that is another one for each of those that are sent away together.
  static constexpr size_t kMostWaiting = 64;
  void Run(std::function<void()> task);
  absl::Status TryRun(std::function<void()> task);

 private:
  void Work();
  // Waits for one; none once the pool ends and nothing is left.
  std::optional<std::function<void()>> Next() ABSL_LOCKS_EXCLUDED(mutex_);

  Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  RetrySlots retry_slots_;
  std::vector<std::thread> threads_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_WORKER_POOL_H_
