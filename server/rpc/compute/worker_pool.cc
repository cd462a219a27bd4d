#include "server/rpc/compute/worker_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"

namespace lossd::rpc {

WorkerPool::WorkerPool(int threads) {
  for (int i = 0; i < std::max(1, threads); ++i) threads_.emplace_back([this] { Work(); });
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Run(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

absl::Status WorkerPool::TryRun(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (tasks_.size() >= kMostWaiting) {
      absl::Status status = engine::MakeError(
          absl::StatusCode::kResourceExhausted, engine::RejectReason::kOverload, "",
          absl::StrCat("the server has ", tasks_.size(), " calls of this kind waiting; try again later"));
      engine::AttachRetryDelay(&status, retry_slots_.Next(engine::MonotonicNow()));
      return status;
    }
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void WorkerPool::Work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds is let go outside the lock
    lock.lock();
  }
}

}  // namespace lossd::rpc
