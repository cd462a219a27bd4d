// The one thread that owns a device, and the way to it from every other. Everything that touches device
// memory goes through here: chunks, weight publications, gradient reads, window resets. BatchQueue says what
// goes when.
//
// It is bounded from above: chunks are admitted against the byte credits of their sessions (see
// Engine::OpenSession), and tasks one per call or stream.
#ifndef LOSSD_SERVER_ENGINE_SCHEDULE_BATCH_SCHEDULER_H_
#define LOSSD_SERVER_ENGINE_SCHEDULE_BATCH_SCHEDULER_H_

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/schedule/batch_queue.h"

namespace lossd::engine {

// Who runs the device's loop: a thread of the scheduler's own, or whoever calls Step. The latter is for
// simulations: everything then happens in one thread, in an order that can be repeated.
enum class DeviceLoop { kOwnThread, kByCaller };

class BatchScheduler {
 public:
  using Task = BatchQueue::Task;

  // `device` outlives it. An idle device waits for at most `batching_window` for more of a small batch.
  BatchScheduler(Device* device, absl::Duration batching_window, DeviceLoop loop = DeviceLoop::kOwnThread);
  // Finishes what is queued and what is under way.
  ~BatchScheduler();
  BatchScheduler(const BatchScheduler&) = delete;
  BatchScheduler& operator=(const BatchScheduler&) = delete;

  // Queues a chunk of `source`. Never blocks; any thread.
  void Submit(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk);

  // Takes these out again, unless they were started. Never blocks; any thread.
  void Withdraw(const BatchSource* source, std::vector<std::shared_ptr<QueuedChunk>> chunks);

  // Runs `task` on the device thread once every chunk and task that `source` gave before is done, and before
  // any that it gives afterwards. Never blocks; any thread.
  void Post(const BatchSource* source, Task task);

  // Runs `job`, a product of so many rows, on the device thread when it is the source's turn: BatchQueue.
  // Never blocks; any thread.
  void PostJob(std::shared_ptr<BatchSource> source, int64_t rows, Task job);

  // The same as Post, but everything that chunks left unfinished is finished before
  // (BatchSource::TakeUnfinished).
  void PostLast(std::shared_ptr<BatchSource> source, Task task);

  // Queues what is left of a chunk of `source` that was answered: no later task passes it. Any thread, but
  // before the chunk's batch has ended.
  void FollowUpWith(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk);

  // Nothing that `source` has given, or gives, starts until it is resumed: neither chunks nor tasks nor jobs.
  // Never blocks; any thread.
  void Pause(const BatchSource* source);
  void Resume(const BatchSource* source);

  // Waits until everything that anybody gave so far is done. Not from the device thread.
  void Flush();

  // One turn of the loop. Of DeviceLoop::kByCaller, and then the caller's thread is the device thread.
  void Step() { (void)Turn(); }

 private:
  using Arrival = std::function<void(BatchQueue&)>;

  void Add(Arrival arrival);
  void Run();
  BatchQueue::Step Turn();
  std::vector<Arrival> TakeArrivals();
  // Until something arrives, or may have changed on the device or by the clock. False if it is over.
  bool Wait(BatchQueue::Clock::time_point look_again);
  // There is nothing to do, and nothing more will come. The device thread's.
  bool OverLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Device* const device_;
  const DeviceLoop loop_;
  BatchQueue queue_;  // the device thread's

  Mutex mutex_;
  CondVar wake_;
  std::vector<Arrival> arrivals_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: starts when everything else is there; none of DeviceLoop::kByCaller
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SCHEDULE_BATCH_SCHEDULER_H_
