#include "server/engine/common/worker_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"

namespace lossd::engine {

WorkerPool::WorkerPool(int threads) {
  for (int i = 0; i < std::max(1, threads); ++i) threads_.emplace_back([this] { Work(); });
}

WorkerPool::~WorkerPool() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Run(std::function<void()> task) {
  {
    const MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.NotifyOne();
}

absl::Status WorkerPool::TryRun(std::function<void()> task) {
  {
    const MutexLock lock(mutex_);
    if (tasks_.size() >= kMostWaiting) {
      absl::Status status = MakeError(
          absl::StatusCode::kResourceExhausted, RejectReason::kOverload, "",
          absl::StrCat("the server has ", tasks_.size(), " calls of this kind waiting; try again later"));
      AttachRetryDelay(&status, retry_slots_.Next(MonotonicNow()));
      return status;
    }
    tasks_.push_back(std::move(task));
  }
  wake_.NotifyOne();
  return absl::OkStatus();
}

void WorkerPool::Work() {
  // What a task holds is let go at the end of its turn, outside the lock.
  while (const std::optional<std::function<void()>> task = Next()) (*task)();
}

std::optional<std::function<void()>> WorkerPool::Next() {
  const MutexLock lock(mutex_);
  while (!stopping_ && tasks_.empty()) wake_.Wait(mutex_);
  if (tasks_.empty()) return std::nullopt;
  std::function<void()> task = std::move(tasks_.front());
  tasks_.pop_front();
  return task;
}

}  // namespace lossd::engine
