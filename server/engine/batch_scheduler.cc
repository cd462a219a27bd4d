#include "server/engine/batch_scheduler.h"

#include <future>
#include <utility>

namespace lossd::engine {

BatchScheduler::BatchScheduler() : thread_([this] { Run(); }) {}

BatchScheduler::~BatchScheduler() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void BatchScheduler::Post(Task task) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void BatchScheduler::Flush() {
  std::promise<void> reached;
  Post([&reached] { reached.set_value(); });
  reached.get_future().wait();
}

void BatchScheduler::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it owned goes before the lock is taken again
    lock.lock();
  }
}

}  // namespace lossd::engine
