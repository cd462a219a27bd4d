// Batches of a head on the device: described to its backend, answered as results come, and ended in order.
//
// Belongs to the device thread; no lock.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_BATCH_RUNNER_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_BATCH_RUNNER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/common/counters.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/chunk_item.h"
#include "server/engine/head/parts/teacher_lease.h"

namespace lossd::engine {

// A chunk that was started.
struct StartedChunk {
  std::shared_ptr<ChunkItem> item;
  ChunkAnswer answer;
  absl::Time answered;
};

// Learns what became of chunks and batches.
class BatchOwner {
 public:
  virtual ~BatchOwner() = default;
  // The device is done with a batch: with its chunks, in order, before anything else is called.
  virtual void OnBatchEnded() = 0;
  // This chunk, which is no rejected one, is about to be answered. Its dW may still be under way.
  virtual void OnChunkAnswered(const ChunkItem& item) = 0;
  // The device is done with this chunk: if its dW went with the batch, it is there.
  virtual void OnChunkDone(ChunkItem& item) = 0;
  // dW may hold part of a batch. None of its chunks is done.
  virtual void OnDeviceFailure(const absl::Status& status) = 0;
};

class BatchRunner {
 public:
  // When the device was done with its last batch, of whatever head; null if nobody asks.
  using DeviceDone = std::shared_ptr<std::optional<absl::Time>>;

  // All of these outlive it.
  struct Parts {
    const HeadConfig* config = nullptr;
    HeadBackend* backend = nullptr;
    Device* device = nullptr;
    Counters* counters = nullptr;
    HeadCounters* head_counters = nullptr;
    DeviceDone device_done;
  };
  explicit BatchRunner(Parts parts) : parts_(std::move(parts)) {}

  // Computes and answers these chunks, some of which may be rejected: those are answered in their turn,
  // behind what is under way of the same holder. Batches of different holders may be answered in any order,
  // but a lane's chunks have one holder. `teacher`: the lease of the head whose soft targets the chunks want,
  // null without. `owner` stays until `on_ended`, which is called when nothing more is to come of them.
  void Run(std::shared_ptr<BatchOwner> owner, std::deque<StartedChunk> chunks,
           std::shared_ptr<TeacherLease> teacher, std::function<void()> on_ended);

 private:
  // Chunks that the device has together, and rejected ones between and behind them that wait for their turn.
  struct Batch {
    std::shared_ptr<BatchOwner> owner;
    // Stay where they are when others join: the device writes into them.
    std::deque<StartedChunk> chunks;
    absl::Time started;
    std::optional<DeviceTimes> device_times;
    double loss_sum = 0;  // of new chunks that train and are answered, and their valid tokens
    int64_t valid_tokens = 0;
    std::vector<std::function<void()>> on_ended;
    std::shared_ptr<TeacherLease> teacher;
  };
  // A chunk that is to be answered.
  struct Turn {
    std::shared_ptr<Batch> batch;
    StartedChunk* chunk = nullptr;  // of that batch
  };

  // The chunks of a batch, from this one on, are to be answered. Rejected ones are, if it is their turn.
  void Queue(const std::shared_ptr<Batch>& batch, size_t first);
  void Compute(const std::shared_ptr<Batch>& batch);
  // What the device gets, and where it puts its results: into the answer, or dX into a region.
  ChunkRows Describe(StartedChunk& started) const;
  ChunkTimes TimesOf(const Batch& batch, const ChunkItem& item) const;
  // Those of one holder.
  void AnswerNext(int32_t holder);
  void AnswerRejected(int32_t holder);
  void EndBatch(Batch& batch, const absl::StatusOr<BatchReport>& report);
  void CountAnswered(const Batch& batch, const StartedChunk& chunk);
  void CountDone(const StartedChunk& chunk);
  void CountLosses(Batch& batch, const ChunkItem& item, const ChunkAnswer& answer);

  const Parts parts_;
  std::deque<std::shared_ptr<Batch>> batches_;  // under way, in order
  std::map<int32_t, std::deque<Turn>> turns_;   // by holder; none is empty
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_BATCH_RUNNER_H_
