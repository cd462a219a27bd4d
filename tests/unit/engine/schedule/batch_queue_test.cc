// What goes to the device when: without threads, and with a clock of the test's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/engine/schedule/batch_queue_fixture.h"

namespace lossd::engine::batch_queue_test {
namespace {

using Clock = BatchQueue::Clock;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
TEST_F(BatchQueueTest, AnIdleDeviceGetsWhatIsThereAndABusyOneTheNextBatch) {
  Add("1", 1);
  EXPECT_THAT(Run(), ElementsAre("1"));
  Add("2", 1);
  EXPECT_THAT(Run(), ElementsAre("2"));
}

TEST_F(BatchQueueTest, NothingOfALineThatIsPausedStartsAndFencesDoNotWaitForIt) {
  queue_.Pause(a_.get());
  Add("1", 1);
  AddTask("task");
  queue_.AddFence([this] { events_.push_back("fence"); });
  EXPECT_THAT(Run(), ElementsAre("fence"));
  queue_.Resume(a_.get());
  EXPECT_THAT(Run(), ElementsAre("1"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("task"));
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
  const BatchKey other{kernels::DataType::kBFloat16, kernels::DataType::kFloat32,
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

TEST_F(BatchQueueTest, ChunksThatDifferInAnyLossOptionOrReturnAreNotGathered) {
  std::vector<BatchKey> kinds(11);
  kinds[1].options.logit_scale = 2;
  kinds[2].options.softcap = 30;
  kinds[3].options.label_smoothing = 0.1f;
  kinds[4].options.lse_square_scale = 1e-4f;
  kinds[5].class_weights = ClassWeights::kUse;
  kinds[6].returns.log_sum_exp = true;
  kinds[7].returns.top_k = 5;
  kinds[8].returns.top_k = 6;
  kinds[9].options.softcap = 50;
  kinds[10].bias = Bias::kUse;
  for (size_t i = 0; i < kinds.size(); ++i) {
    AddOf(i + 1, std::to_string(i), 1, kinds[i]);
    AddOf(i + 101, "same", 1, kinds[i]);
  }
  std::vector<std::string> batches;
  for (size_t i = 0; i < kinds.size(); ++i) {
    device_.under_way = 1;
    for (const std::string& batch : Run()) batches.push_back(batch);
  }
  EXPECT_THAT(batches, ElementsAre("0+same", "1+same", "2+same", "3+same", "4+same", "5+same", "6+same",
                                   "7+same", "8+same", "9+same", "10+same"));
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
  const BatchKey other{kernels::DataType::kFloat16, kernels::DataType::kFloat16, ComputeMode::kLossOnly};
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
}  // namespace lossd::engine::batch_queue_test
