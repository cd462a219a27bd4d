#include "server/engine/schedule/batch_scheduler.h"

#include <sys/prctl.h>

#include <future>
#include <utility>

namespace lossd::engine {
namespace {

using Clock = BatchQueue::Clock;

// A batch of a large head takes milliseconds, asking the device about a microsecond.
constexpr std::chrono::microseconds kPollInterval{30};

}  // namespace

BatchScheduler::BatchScheduler(Device* device, absl::Duration batching_window, DeviceLoop loop)
    : device_(device), loop_(loop), queue_(device, absl::ToChronoNanoseconds(batching_window)) {
  if (loop == DeviceLoop::kOwnThread) thread_ = std::thread([this] { Run(); });
}

BatchScheduler::~BatchScheduler() {
  Add([](BatchQueue& queue) { queue.ResumeAll(); });
  Flush();  // waits for no batching window
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.NotifyOne();
  if (thread_.joinable()) thread_.join();
}

void BatchScheduler::Submit(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk) {
  Add([source = std::move(source), chunk = std::move(chunk), now = Clock::now()](BatchQueue& queue) mutable {
    queue.AddChunk(std::move(source), std::move(chunk), now);
  });
}

void BatchScheduler::Withdraw(const BatchSource* source, std::vector<std::shared_ptr<QueuedChunk>> chunks) {
  Add([source, chunks = std::move(chunks)](BatchQueue& queue) { queue.Withdraw(source, chunks); });
}

void BatchScheduler::Post(const BatchSource* source, Task task) {
  Add([source, task = std::move(task)](BatchQueue& queue) mutable {
    queue.AddTask(source, std::move(task));
  });
}

void BatchScheduler::PostJob(std::shared_ptr<BatchSource> source, int64_t rows, Task job) {
  Add([source = std::move(source), rows, job = std::move(job)](BatchQueue& queue) mutable {
    queue.AddJob(source, rows, std::move(job));
  });
}

void BatchScheduler::PostLast(std::shared_ptr<BatchSource> source, Task task) {
  Add([source = std::move(source), task = std::move(task)](BatchQueue& queue) mutable {
    queue.AddLastTask(std::move(source), std::move(task));
  });
}

void BatchScheduler::Pause(const BatchSource* source) {
  Add([source](BatchQueue& queue) { queue.Pause(source); });
}

void BatchScheduler::Resume(const BatchSource* source) {
  Add([source](BatchQueue& queue) { queue.Resume(source); });
}

void BatchScheduler::FollowUpWith(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk) {
  Add([source = std::move(source), chunk = std::move(chunk), now = Clock::now()](BatchQueue& queue) mutable {
    queue.AddFollowUp(std::move(source), std::move(chunk), now);
  });
}

void BatchScheduler::Flush() {
  std::promise<void> reached;
  Add([&reached](BatchQueue& queue) { queue.AddFence([&reached] { reached.set_value(); }); });
  std::future<void> done = reached.get_future();
  if (loop_ == DeviceLoop::kByCaller) {
    while (done.wait_for(std::chrono::seconds(0)) != std::future_status::ready) Step();
  }
  done.wait();
}

void BatchScheduler::Add(Arrival arrival) {
  {
    const MutexLock lock(mutex_);
    arrivals_.push_back(std::move(arrival));
  }
  wake_.NotifyOne();
}

void BatchScheduler::Run() {
  // Short waits of this thread end when they should; others may be off by 50 µs. No matter if it is refused.
  (void)prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  BatchQueue::Step step;
  do {
    step = Turn();
  } while (step.progress || Wait(step.look_again));
}

BatchQueue::Step BatchScheduler::Turn() {
  device_->Poll();
  // Only now: whatever came before a batch was done can go into the one that takes its place.
  for (const Arrival& arrival : TakeArrivals()) arrival(queue_);
  return queue_.Advance(Clock::now());
}

std::vector<BatchScheduler::Arrival> BatchScheduler::TakeArrivals() {
  const MutexLock lock(mutex_);
  return std::exchange(arrivals_, {});
}

bool BatchScheduler::OverLocked() const { return stopping_ && arrivals_.empty() && queue_.Empty(); }

bool BatchScheduler::Wait(Clock::time_point look_again) {
  const MutexLock lock(mutex_);
  const Clock::time_point until = device_->BatchesUnderWay() > 0 ? Clock::now() + kPollInterval : look_again;
  while (arrivals_.empty() && !OverLocked()) {
    if (until == Clock::time_point::max()) {
      wake_.Wait(mutex_);
    } else if (wake_.WaitUntil(mutex_, until) == std::cv_status::timeout) {
      break;
    }
  }
  return !OverLocked();
}

}  // namespace lossd::engine
