// The one queue in front of a device, and the one thread that owns the device. Everything that touches device
// memory goes through it in order: chunks, weight publications, gradient reads, window resets.
//
// It is bounded from above: chunks are admitted against the byte credits of their lanes (see
// Engine::OpenSession), and other tasks one per call or stream.
#ifndef LOSSD_SERVER_ENGINE_BATCH_SCHEDULER_H_
#define LOSSD_SERVER_ENGINE_BATCH_SCHEDULER_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace lossd::engine {

class BatchScheduler {
 public:
  using Task = std::function<void()>;

  BatchScheduler();
  // Finishes what is queued.
  ~BatchScheduler();
  BatchScheduler(const BatchScheduler&) = delete;
  BatchScheduler& operator=(const BatchScheduler&) = delete;

  // Runs `task` on the device thread after everything posted before it. Never blocks; any thread.
  void Post(Task task);

  // Waits until everything posted so far has run. Not from the device thread.
  void Flush();

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> queue_;
  bool stopping_ = false;
  std::thread thread_;  // last: starts when everything else is there
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_BATCH_SCHEDULER_H_
