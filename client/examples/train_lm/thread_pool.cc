#include "client/examples/train_lm/thread_pool.h"

#include <algorithm>

namespace lossd::train_lm {

ThreadPool::ThreadPool(int threads) {
  for (int64_t worker = 1; worker < threads; ++worker) {
    workers_.emplace_back([this, worker] { Work(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::For(int64_t count, int64_t granularity, const std::function<void(int64_t, int64_t)>& work) {
  if (count <= 0) return;
  const int64_t grains = (count + granularity - 1) / granularity;
  const int64_t range = (grains + threads() - 1) / threads() * granularity;
  if (range >= count) {
    work(0, count);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    work_ = &work;
    count_ = count;
    range_ = range;
    running_ = static_cast<int64_t>(workers_.size());
    ++round_;
  }
  wake_.notify_all();
  work(0, range);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
}

void ThreadPool::Work(int64_t worker) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    const auto& work = *work_;
    const int64_t begin = worker * range_;
    const int64_t end = std::min(count_, begin + range_);
    lock.unlock();
    if (begin < end) work(begin, end);
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace lossd::train_lm
