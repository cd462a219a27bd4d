// What waits for a device, and in which order it goes: one line of chunks and tasks for each head.
//
// In a line, a task runs only after every chunk before it is done, and no chunk passes a task. Chunks of one
// kind that stand one after the other are gathered into one batch, up to what the head's backend finds worth
// it. Of several lines, the one whose first entry came first goes first, unless it has to wait for the clock
// or for its own chunks; while it waits for the device, no batch of another line passes it.
//
// When a batch goes:
//   - full, or something stands behind it that it cannot take: as soon as the device has room for it
//   - else, if the device has one batch under way: at once, so that there is always a next one
//   - else, if it has more: it waits and grows until one of them is done
//   - else, the device being idle: once its first chunk has waited for the batching window
//
// Belongs to the device's owner thread.
#ifndef LOSSD_SERVER_ENGINE_BATCH_QUEUE_H_
#define LOSSD_SERVER_ENGINE_BATCH_QUEUE_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "server/engine/head_backend.h"

namespace lossd::engine {

// A chunk as the queue sees it. Does not change once it is queued.
struct QueuedChunk {
  RowKind row_kind;
  int64_t rows = 0;  // none: costs the device nothing, and may be part of any batch
};

// Whose chunks they are: a head. Called on the device's owner thread alone.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // HeadBackend's.
  virtual int64_t RowsPerBatch(const RowKind& kind) const = 0;
  // Starts those chunks that still count, in order. `on_ended` is called once, when no answer and no applied
  // mark of them is to come any more; perhaps before this returns.
  virtual void StartBatch(std::vector<std::shared_ptr<QueuedChunk>> chunks,
                          std::function<void()> on_ended) = 0;
};

class BatchQueue {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = std::function<void()>;

  BatchQueue(const Device* device, Clock::duration window) : device_(device), window_(window) {}

  void AddChunk(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk,
                Clock::time_point arrival);
  // The line is `source`'s; null has one too.
  void AddTask(const BatchSource* source, Task task);
  // `task` runs after everything that is there, in whatever line.
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
    uint64_t number = 0;  // by one with each entry of any line
    std::shared_ptr<BatchSource> source;
    std::shared_ptr<QueuedChunk> chunk;  // null: a task
    Clock::time_point arrival;
    Task task;
  };
  // The batch that the first entries of a line make up.
  struct Gathered {
    size_t chunks = 0;
    int64_t rows = 0;
    const RowKind* kind = nullptr;  // of the first chunk that has rows
    int64_t most = 0;               // rows
    bool complete = false;          // takes no more
  };
  struct Line {
    std::deque<Entry> entries;
    Gathered next;
    int64_t under_way = 0;  // batches
  };

  // Lets the next batch take what has come since.
  static void Gather(Line& line);
  static bool Fits(const Entry& entry, const Gathered& gathered);
  // When this batch may go, as far as the clock decides: max if something else does.
  Clock::time_point StartTime(const Gathered& gathered, Clock::time_point arrival) const;
  void RunTask(Line& line);
  void StartBatch(Line& line);

  const Device* const device_;
  const Clock::duration window_;
  std::map<const BatchSource*, Line> lines_;  // those that have something waiting or under way
  uint64_t next_number_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_BATCH_QUEUE_H_
