// What goes to the device when: without threads, and with a clock of the test's own.
#include "server/engine/batch_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace lossd::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Clock = BatchQueue::Clock;

constexpr int64_t kMostRows = 8;

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

  int64_t RowsPerBatch(const RowKind& /*kind*/) const override { return kMostRows; }
  void StartBatch(std::vector<std::shared_ptr<QueuedChunk>> chunks, std::function<void()> on_ended) override {
    std::string event;
    int64_t rows = 0;
    for (const std::shared_ptr<QueuedChunk>& chunk : chunks) {
      event += (event.empty() ? "" : "+") + std::static_pointer_cast<NamedChunk>(chunk)->name;
      rows += chunk->rows;
    }
    events_->push_back(std::move(event));
    if (rows == 0) return on_ended();
    ++device_->under_way;
    ended_.push_back(std::move(on_ended));
  }
  void EndOldest() {
    --device_->under_way;
    ended_.front()();
    ended_.erase(ended_.begin());
  }

 private:
  CountingDevice* const device_;
  std::vector<std::string>* const events_;
  std::vector<std::function<void()>> ended_;
};

class BatchQueueTest : public ::testing::Test {
 protected:
  void Add(const std::string& name, int64_t rows, std::shared_ptr<BatchSource> source = nullptr,
           RowKind kind = {}) {
    auto chunk = std::make_shared<NamedChunk>();
    chunk->name = name;
    chunk->rows = rows;
    chunk->row_kind = kind;
    queue_.AddChunk(source == nullptr ? a_ : std::move(source), std::move(chunk), now_);
  }
  void AddTask(const std::string& name, const BatchSource* source = nullptr) {
    queue_.AddTask(source == nullptr ? a_.get() : source, [this, name] { events_.push_back(name); });
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

  static constexpr Clock::duration kWindow = std::chrono::milliseconds(5);
  CountingDevice device_;
  std::vector<std::string> events_;
  std::shared_ptr<RecordingSource> a_ = std::make_shared<RecordingSource>(&device_, &events_);
  std::shared_ptr<RecordingSource> b_ = std::make_shared<RecordingSource>(&device_, &events_);
  Clock::time_point now_ = Clock::time_point(std::chrono::hours(1));
  Clock::time_point look_again_;
  BatchQueue queue_;

  explicit BatchQueueTest(Clock::duration window = Clock::duration::zero()) : queue_(&device_, window) {}
};

TEST_F(BatchQueueTest, AnIdleDeviceGetsWhatIsThereAndABusyOneTheNextBatch) {
  Add("1", 1);
  EXPECT_THAT(Run(), ElementsAre("1"));
  Add("2", 1);
  EXPECT_THAT(Run(), ElementsAre("2"));
}

TEST_F(BatchQueueTest, WithTwoUnderWayASmallBatchGrowsUntilOneIsDone) {
  device_.under_way = 2;
  Add("1", 1);
  EXPECT_THAT(Run(), IsEmpty());
  EXPECT_EQ(look_again_, Clock::time_point::max()) << "the clock alone changes nothing";
  Add("2", 3);
  Add("3", 2);
  EXPECT_THAT(Run(), IsEmpty());
  device_.under_way = 1;
  EXPECT_THAT(Run(), ElementsAre("1+2+3"));
}

TEST_F(BatchQueueTest, AFullBatchTakesTheLastSlotAndNothingGoesWithoutOne) {
  device_.under_way = 2;
  for (const char* name : {"1", "2", "3", "4"}) Add(name, 3);
  EXPECT_THAT(Run(), ElementsAre("1+2"));
  EXPECT_EQ(device_.under_way, 3);
  Add("5", 3);
  EXPECT_THAT(Run(), IsEmpty());
}

TEST_F(BatchQueueTest, AChunkThatFillsABatchOrMoreGoesAlone) {
  Add("exact", kMostRows);
  Add("large", 100 * kMostRows);
  Add("small", 1);
  EXPECT_THAT(Run(), ElementsAre("exact", "large"));
}

TEST_F(BatchQueueTest, OnlyNeighboursOfOneKindAreGathered) {
  const RowKind other{kernels::DataType::kBFloat16, kernels::DataType::kFloat32,
                      ComputeMode::kLossAndGradients};
  device_.under_way = 1;
  Add("1", 1);
  Add("2", 1);
  Add("3", 1, nullptr, other);
  Add("4", 1, nullptr, other);
  EXPECT_THAT(Run(), ElementsAre("1+2")) << "it cannot grow";
  device_.under_way = 1;
  EXPECT_THAT(Run(), ElementsAre("3+4"));
}

TEST_F(BatchQueueTest, ATaskWaitsForTheChunksBeforeItAndHoldsBackThoseBehind) {
  Add("1", 1);
  AddTask("task");
  Add("2", 1);
  EXPECT_THAT(Run(), ElementsAre("1"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("task", "2"));
  a_->EndOldest();
  Run();
  EXPECT_TRUE(queue_.Empty());
}

TEST_F(BatchQueueTest, ABatchInFrontOfATaskGoesThoughTwoAreUnderWay) {
  device_.under_way = 2;
  Add("1", 1);
  EXPECT_THAT(Run(), IsEmpty());
  AddTask("task");
  EXPECT_THAT(Run(), ElementsAre("1"));
}

TEST_F(BatchQueueTest, AnotherHeadGoesOnWhileOneWaitsForItsTask) {
  Add("a1", 1);
  AddTask("task of a");
  Add("a2", 1);
  Add("b1", 1, b_);
  EXPECT_THAT(Run(), ElementsAre("a1", "b1"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("task of a", "a2"));
}

TEST_F(BatchQueueTest, TheHeadThatWaitsLongestGoesFirst) {
  device_.under_way = 2;
  Add("b1", 1, b_);
  Add("a1", 1);
  Add("b2", 1, b_);
  EXPECT_THAT(Run(), IsEmpty());
  device_.under_way = 1;
  EXPECT_THAT(Run(), ElementsAre("b1+b2"));
  device_.under_way = 1;
  EXPECT_THAT(Run(), ElementsAre("a1"));
}

TEST_F(BatchQueueTest, AHeadThatAlwaysHasAFullBatchDoesNotKeepAnotherWaiting) {
  Add("a", kMostRows);
  Add("a", kMostRows);
  EXPECT_THAT(Run(), ElementsAre("a", "a"));
  Add("b", 1, b_);
  for (int i = 0; i < 4; ++i) Add("a", kMostRows);
  EXPECT_THAT(Run(), IsEmpty()) << "two are enough, and it is the turn of b";
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("b", "a"));
}

TEST_F(BatchQueueTest, ABatchThatWaitsHoldsBackNoTaskAndNoChunkWithoutRows) {
  device_.under_way = 2;
  Add("b", 1, b_);
  AddTask("task");
  Add("bad", 0);
  EXPECT_THAT(Run(), ElementsAre("task", "bad"));
}

TEST_F(BatchQueueTest, ChunksWithoutRowsFitEverywhereAndNeedNoSlot) {
  device_.under_way = 1;
  const RowKind other{kernels::DataType::kFloat16, kernels::DataType::kFloat16, ComputeMode::kLossOnly};
  Add("1", 1);
  Add("bad", 0, nullptr, other);
  Add("2", 1);
  EXPECT_THAT(Run(), ElementsAre("1+bad+2"));
  device_.under_way = 3;
  Add("bad too", 0);
  EXPECT_THAT(Run(), ElementsAre("bad too"));
}

TEST_F(BatchQueueTest, AFenceComesAfterEverythingInEveryLine) {
  Add("a1", 1);
  Add("b1", 1, b_);
  queue_.AddFence([this] { events_.emplace_back("fence"); });
  Add("a2", 1);
  EXPECT_THAT(Run(), ElementsAre("a1", "b1"));
  b_->EndOldest();
  EXPECT_THAT(Run(), IsEmpty());
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("fence", "a2"));
}

TEST_F(BatchQueueTest, AFenceWithNothingBeforeItComesAtOnce) {
  queue_.AddFence([this] { events_.emplace_back("fence"); });
  EXPECT_THAT(Run(), ElementsAre("fence"));
  EXPECT_TRUE(queue_.Empty());
}

class BatchingWindowTest : public BatchQueueTest {
 protected:
  BatchingWindowTest() : BatchQueueTest(kWindow) {}
};

TEST_F(BatchingWindowTest, AnIdleDeviceWaitsFromTheOldestChunkOn) {
  const Clock::time_point arrival = now_;
  Add("1", 1);
  EXPECT_THAT(Run(), IsEmpty());
  EXPECT_EQ(look_again_, arrival + kWindow);
  now_ += kWindow / 2;
  Add("2", 1);
  EXPECT_THAT(Run(), IsEmpty());
  EXPECT_EQ(look_again_, arrival + kWindow);
  now_ = arrival + kWindow;
  EXPECT_THAT(Run(), ElementsAre("1+2"));
}

TEST_F(BatchingWindowTest, AFullBatchDoesNotWait) {
  Add("1", kMostRows - 1);
  EXPECT_THAT(Run(), IsEmpty());
  Add("2", 1);
  EXPECT_THAT(Run(), ElementsAre("1+2"));
}

TEST_F(BatchingWindowTest, ATaskOrAFenceBehindTheBatchCutsItShort) {
  Add("1", 1);
  AddTask("task");
  EXPECT_THAT(Run(), ElementsAre("1"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("task"));
  Add("2", 1);
  queue_.AddFence([] {});
  EXPECT_THAT(Run(), ElementsAre("2"));
}

TEST_F(BatchingWindowTest, ABusyDeviceDoesNotWait) {
  device_.under_way = 1;
  Add("1", 1);
  EXPECT_THAT(Run(), ElementsAre("1"));
}

}  // namespace
}  // namespace lossd::engine
