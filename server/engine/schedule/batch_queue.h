// What waits for a device, and in which order it goes: one line of chunks and tasks for each head.
//
// In a line, a task runs only after every chunk given before it is done, and no chunk given after it passes
// it. Between tasks the sessions of a head share its batches evenly: see SessionQueues.
//
// Heads share the device by cost, so that one with a large vocabulary or many clients does not keep others
// waiting: the line whose batches have cost least goes first, among equals the one that waits longest. While
// its batch waits for the device, no batch of another line passes it: full ones of others would leave a small
// one no gap, and the device has enough to do as long as one has to wait. One that waits for the clock holds
// nothing back. Tasks take turns with batches and cost nothing.
//
// Jobs are tasks that cost something: work that the head's chunks and other tasks need not wait for, nor it
// for them. One goes when it is its line's turn, among what else is in that line by age, and only while
// nothing is under way: whoever waits for a batch hears of it first.
//
// When a batch goes:
//   - full, or something waits that it cannot take: as soon as the device has room for it
//   - else, if the device has one batch under way: at once, so that there is always a next one
//   - else, if it has more: it waits and grows until one of them is done
//   - else, the device being idle: once its oldest chunk has waited for the batching window
//
// Chunks may have follow-ups: work that is left of them when they were answered (tiles that are complete).
// Tasks wait for the follow-ups of all chunks before them, too.
//
// A task may change what other lines compute with: the weights of a head that teaches them. They may go on
// with chunks that are not started, but not with what is left of those that were: so that comes first, and
// nothing else starts meanwhile (a recall).
//
// Belongs to the device's owner thread.
#ifndef LOSSD_SERVER_ENGINE_SCHEDULE_BATCH_QUEUE_H_
#define LOSSD_SERVER_ENGINE_SCHEDULE_BATCH_QUEUE_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "server/engine/device/head_backend.h"
#include "server/engine/schedule/session_queues.h"

namespace lossd::engine {

// Whose chunks they are: a head. Called on the device's owner thread alone.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // HeadBackend's.
  virtual int64_t RowsPerBatch(const BatchKey& kind) const = 0;
  // The device's time for a row, in any unit that all sources have in common; at least 1.
  virtual int64_t CostPerRow() const = 0;
  // Starts those chunks that still count, in order. `on_ended` is called once, when no answer and no applied
  // mark of them is to come any more; perhaps before this returns.
  virtual void StartBatch(std::vector<std::shared_ptr<QueuedChunk>> chunks,
                          std::function<void()> on_ended) = 0;
  // What chunks that ended left unfinished because more was to come: to be finished as it is. See
  // BatchQueue::AddLastTask.
  virtual std::vector<std::shared_ptr<QueuedChunk>> TakeUnfinished() { return {}; }
  // Asked before a last task: other sources that may have work left which needs what the task is to change.
  virtual std::vector<std::shared_ptr<BatchSource>> Borrowers() { return {}; }
  // That work, `lender` being whose task it is: what chunks left unfinished, as it is, and of what is queued
  // already that which needs it, with all that has to go before. It is started in this order, and before this
  // is asked again. No batch of this source is under way.
  virtual std::vector<std::shared_ptr<QueuedChunk>> TakeBorrowed(const BatchSource& /*lender*/) { return {}; }
};

class BatchQueue {
 public:
  using Clock = SessionQueues::Clock;
  using Task = std::function<void()>;

  BatchQueue(const Device* device, Clock::duration window) : device_(device), window_(window) {}

  void AddChunk(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk,
                Clock::time_point arrival);
  // These leave at once, if they were not started; a batch that was gathered with them does without.
  void Withdraw(const BatchSource* source, const std::vector<std::shared_ptr<QueuedChunk>>& chunks);
  // The line is `source`'s; null has one too.
  void AddTask(const BatchSource* source, Task task);
  // A task before which everything unfinished is finished: `source` is asked for it, until there is none, and
  // so are its Borrowers.
  void AddLastTask(std::shared_ptr<BatchSource> source, Task task);
  // `chunk` was started, and its batch has not ended, or was the last thing that happened.
  void AddFollowUp(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk,
                   Clock::time_point arrival);
  // A product with the weights of so many rows, which is a third of what a batch does.
  void AddJob(const std::shared_ptr<BatchSource>& source, int64_t rows, Task task);
  // Nothing of the source's line starts until it is resumed; what is under way goes on. Nothing happens to
  // one that is paused, or is not.
  void Pause(const BatchSource* source);
  void Resume(const BatchSource* source);
  // All lines are resumed, and none is paused any more: it is the end.
  void ResumeAll();
  // `task` runs after everything that is there, in whatever line that is not paused.
  void AddFence(Task task);

  // Starts one batch or runs one task, if one can go now. If none can: whether and when the clock alone will
  // change that.
  struct Step {
    bool progress = false;
    Clock::time_point look_again = Clock::time_point::max();
  };
  Step Advance(Clock::time_point now);

  // Nothing waits and nothing is under way.
  bool Empty() const { return lines_.empty(); }

 private:
  struct Entry {
    std::shared_ptr<BatchSource> source;  // of a task: null unless it is a last one
    std::shared_ptr<QueuedChunk> chunk;   // null: a task
    uint64_t number = 0;                  // by one with each entry of any line
    Clock::time_point arrival;
    Task task;
  };
  struct Job {
    uint64_t number = 0;  // as an entry's
    int64_t cost = 0;
    Task task;
  };
  struct Line {
    std::shared_ptr<BatchSource> source;  // null while no chunk waits
    SessionQueues chunks;
    std::deque<Entry> held;  // a task, and what was given after it
    std::deque<Job> jobs;
    SessionQueues::Batch next;
    int64_t under_way = 0;  // batches
    bool paused = false;
    // What its batches and jobs have cost more than those of the line whose turn it was last had before.
    int64_t lead = 0;

    bool busy() const { return under_way > 0 || paused || !held.empty() || !chunks.Empty() || !jobs.empty(); }
  };

  static void Release(Line& line);
  static void TakeUp(Line& line, Entry entry);
  // What a task that is next in this line has to wait for all the same.
  bool TakeUpUnfinished(Line& line);
  void RunTask(Line& line);
  // Whether others have something to finish before the task that is next in this line.
  bool BeginRecall(Line& line);
  Step GoOnWithRecall(Clock::time_point now);
  // Forgets lines that have nothing and are ahead of nobody.
  void Settle();
  bool RunReadyTask();
  // What a line has for the device: its batch, or a job.
  enum class Kind { kBatch, kJob };
  struct Candidate {
    int64_t lead = 0;
    uint64_t number = 0;
    Kind kind = Kind::kBatch;
    Line* line = nullptr;
  };
  // Lets every line gather, and starts the best batch or job that can go.
  Step StartReady(Clock::time_point now);
  // When it may go, as far as the clock decides: max if something else does.
  Clock::time_point StartTime(const Candidate& candidate) const;
  static void RunJob(Line& line);
  void StartBatch(Line& line);
  void Start(Line& line, BatchSource& source, std::vector<std::shared_ptr<QueuedChunk>> batch, int64_t rows);

  struct Recall {
    Line* line = nullptr;  // whose task waits
    std::vector<std::shared_ptr<BatchSource>> borrowers;
    std::deque<std::pair<std::shared_ptr<BatchSource>, std::shared_ptr<QueuedChunk>>>
        chunks;  // to be started
  };

  const Device* const device_;
  const Clock::duration window_;
  std::map<const BatchSource*, Line> lines_;  // those that are busy, and those ahead of others
  uint64_t next_number_ = 0;
  std::optional<Recall> recall_;
  bool may_pause_ = true;
  bool task_was_last_ = false;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SCHEDULE_BATCH_QUEUE_H_
