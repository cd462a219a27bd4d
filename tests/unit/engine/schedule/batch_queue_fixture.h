// A queue in front of a device that counts, for sources that write down what they are told to start. No
// threads, and a clock of the test's own.
#ifndef LOSSD_TESTS_UNIT_ENGINE_SCHEDULE_BATCH_QUEUE_FIXTURE_H_
#define LOSSD_TESTS_UNIT_ENGINE_SCHEDULE_BATCH_QUEUE_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/schedule/batch_queue.h"

namespace lossd::engine {

inline constexpr int64_t kMostRows = 8;  // of a batch, by default

class CountingDevice : public Device {
 public:
  std::string name() const override { return "counting"; }
  std::string description() const override { return "counting"; }
  int64_t AvailableMemory() const override { return 0; }
  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& /*config*/) const override { return MemoryPlan(); }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& /*config*/) override {
    return absl::UnimplementedError("no heads");
  }
  MemoryPlan SharedMemory() const override { return {}; }
  int64_t MostBatches() const override { return 3; }
  int64_t BatchesUnderWay() const override { return under_way; }

  int64_t under_way = 0;
};

struct NamedChunk : QueuedChunk {
  std::string name;
};

// Writes down what it is told to start.
class RecordingSource : public BatchSource {
 public:
  RecordingSource(CountingDevice* device, std::vector<std::string>* events)
      : device_(device), events_(events) {}

  int64_t RowsPerBatch(const BatchKey& /*kind*/) const override { return rows_per_batch; }
  int64_t CostPerRow() const override { return cost_per_row; }
  void StartBatch(std::vector<std::shared_ptr<QueuedChunk>> chunks, std::function<void()> on_ended) override {
    std::string event;
    int64_t rows = 0;
    for (const std::shared_ptr<QueuedChunk>& chunk : chunks) {
      event += (event.empty() ? "" : "+") + std::static_pointer_cast<NamedChunk>(chunk)->name;
      rows += chunk->rows;
    }
    events_->push_back(std::move(event));
    if (rows == 0) return on_ended();
    batch_rows.push_back(rows);
    ++device_->under_way;
    ended_.push_back(std::move(on_ended));
  }
  void EndOldest() {
    --device_->under_way;
    ended_.front()();
    ended_.erase(ended_.begin());
  }
  size_t under_way() const { return ended_.size(); }
  std::vector<std::shared_ptr<QueuedChunk>> TakeUnfinished() override {
    return std::exchange(unfinished, {});
  }
  std::vector<std::shared_ptr<BatchSource>> Borrowers() override { return borrowers; }
  std::vector<std::shared_ptr<QueuedChunk>> TakeBorrowed(const BatchSource& lender) override {
    EXPECT_EQ(under_way(), 0U);
    events_->push_back(&lender == this ? "itself" : "asked");
    return std::exchange(borrowed, {});
  }

  std::vector<std::shared_ptr<QueuedChunk>> unfinished;
  std::vector<std::shared_ptr<BatchSource>> borrowers;
  std::vector<std::shared_ptr<QueuedChunk>> borrowed;

  int64_t rows_per_batch = kMostRows;
  int64_t cost_per_row = 1;
  std::vector<int64_t> batch_rows;  // of each batch that had any

 private:
  CountingDevice* const device_;
  std::vector<std::string>* const events_;
  std::vector<std::function<void()>> ended_;
};

class BatchQueueTest : public ::testing::Test {
 protected:
  static std::shared_ptr<QueuedChunk> Make(const std::string& name, int64_t rows, BatchKey kind = {},
                                           uint64_t session = 1) {
    auto chunk = std::make_shared<NamedChunk>();
    chunk->name = name;
    chunk->rows = rows;
    chunk->batch_key = kind;
    chunk->session = session;
    return chunk;
  }
  std::shared_ptr<QueuedChunk> Add(const std::string& name, int64_t rows,
                                   std::shared_ptr<BatchSource> source = nullptr, BatchKey kind = {},
                                   uint64_t session = 1) {
    std::shared_ptr<QueuedChunk> chunk = Make(name, rows, kind, session);
    queue_.AddChunk(source == nullptr ? a_ : std::move(source), chunk, now_);
    return chunk;
  }
  // Adds a chunk of head a.
  std::shared_ptr<QueuedChunk> AddOf(uint64_t session, const std::string& name, int64_t rows,
                                     BatchKey kind = {}) {
    return Add(name, rows, nullptr, kind, session);
  }
  void AddTask(const std::string& name, const BatchSource* source = nullptr) {
    queue_.AddTask(source == nullptr ? a_.get() : source, [this, name] { events_.push_back(name); });
  }
  void AddJob(const std::string& name, int64_t rows, const std::shared_ptr<BatchSource>& source) {
    queue_.AddJob(source, rows, [this, name] { events_.push_back(name); });
  }
  void AddFollowUp(const std::string& name, int64_t rows, std::shared_ptr<BatchSource> source = nullptr) {
    queue_.AddFollowUp(source == nullptr ? a_ : std::move(source), Make(name, rows), now_);
  }
  // Advances as far as it goes, and returns what happened meanwhile.
  std::vector<std::string> Run() {
    BatchQueue::Step step;
    do {
      step = queue_.Advance(now_);
    } while (step.progress);
    look_again_ = step.look_again;
    return std::exchange(events_, {});
  }

  static constexpr BatchQueue::Clock::duration kWindow = std::chrono::milliseconds(5);
  CountingDevice device_;
  std::vector<std::string> events_;
  std::shared_ptr<RecordingSource> a_ = std::make_shared<RecordingSource>(&device_, &events_);
  std::shared_ptr<RecordingSource> b_ = std::make_shared<RecordingSource>(&device_, &events_);
  BatchQueue::Clock::time_point now_ = BatchQueue::Clock::time_point(std::chrono::hours(1));
  BatchQueue::Clock::time_point look_again_;
  BatchQueue queue_;

  explicit BatchQueueTest(BatchQueue::Clock::duration window = BatchQueue::Clock::duration::zero())
      : queue_(&device_, window) {}
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_UNIT_ENGINE_SCHEDULE_BATCH_QUEUE_FIXTURE_H_
