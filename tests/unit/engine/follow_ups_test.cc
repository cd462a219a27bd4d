// What is left of chunks that were answered: when it goes, and what waits for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/engine/batch_queue_fixture.h"

namespace lossd::engine::follow_ups_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using FollowUpsTest = BatchQueueTest;

TEST_F(FollowUpsTest, ThoseForIdleTimesWaitUntilNothingElseIsThere) {
  AddFollowUp("rest", 1, FollowUp::kWhenIdle);
  Add("1", 1);
  EXPECT_THAT(Run(), ElementsAre("1")) << "what waits goes first";
  Add("2", 1);
  EXPECT_THAT(Run(), ElementsAre("2"));
  device_.under_way = 1;
  a_->EndOldest();
  EXPECT_THAT(Run(), IsEmpty()) << "another is under way";
  device_.under_way = 1;
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("rest"));
}

TEST_F(FollowUpsTest, InIdleTimesTheyGoAsOneBatchAfterTheOtherSoThatWhatComesMeanwhileNeedNotWaitForAll) {
  for (const char* name : {"1", "2", "3", "4"}) AddFollowUp(name, 3, FollowUp::kWhenIdle);
  EXPECT_THAT(Run(), ElementsAre("1+2"));
  Add("new", 1);
  EXPECT_THAT(Run(), ElementsAre("new"));
  a_->EndOldest();
  EXPECT_THAT(Run(), IsEmpty());
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("3+4"));
}

TEST_F(FollowUpsTest, OfAnotherKindAreAnotherBatchAndOfAnotherHeadTakeTurnsByCost) {
  const RowKind other{kernels::DataType::kBFloat16, kernels::DataType::kFloat32,
                      ComputeMode::kLossAndGradients};
  AddFollowUp("1", 1, FollowUp::kWhenIdle);
  AddFollowUp("2", 1, FollowUp::kWhenIdle, nullptr, other);
  AddFollowUp("b", 1, FollowUp::kWhenIdle, b_);
  EXPECT_THAT(Run(), ElementsAre("1"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("b"));
  b_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("2"));
}

TEST_F(FollowUpsTest, ATaskWaitsForThemAndNothingThatWasGivenAfterItPasses) {
  AddFollowUp("rest", 1, FollowUp::kWhenIdle);
  AddTask("task");
  Add("after", 1);
  EXPECT_THAT(Run(), ElementsAre("rest"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("task", "after"));
}

TEST_F(FollowUpsTest, OneThatComesWhileATaskWaitsGoesBeforeIt) {
  Add("1", 1);
  EXPECT_THAT(Run(), ElementsAre("1"));
  AddTask("task");
  AddFollowUp("in turn", 1, FollowUp::kInTurn);
  AddFollowUp("idle", 1, FollowUp::kWhenIdle);
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("in turn"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("idle"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("task"));
}

TEST_F(FollowUpsTest, HurriedOnesGoInTheirTurnAlthoughTheDeviceIsBusy) {
  device_.under_way = 1;
  for (const char* name : {"1", "2"}) AddFollowUp(name, 4, FollowUp::kWhenIdle);
  EXPECT_THAT(Run(), IsEmpty());
  queue_.HurryFollowUps(a_.get());
  queue_.HurryFollowUps(b_.get());  // has none
  EXPECT_THAT(Run(), ElementsAre("1+2"));
}

TEST_F(FollowUpsTest, AFenceWaitsForThoseOfALineThatHasNothingElse) {
  AddFollowUp("rest", 1, FollowUp::kWhenIdle, b_);
  Add("1", 1);
  EXPECT_FALSE(queue_.Empty());
  queue_.AddFence([this] { events_.emplace_back("fence"); });
  EXPECT_THAT(Run(), ::testing::UnorderedElementsAre("1", "rest"));
  a_->EndOldest();
  EXPECT_THAT(Run(), IsEmpty());
  b_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("fence"));
}

TEST_F(FollowUpsTest, ALastTaskHasEverythingFinishedAndOtherTasksLeaveItUnfinished) {
  a_->unfinished.push_back(Make("unfinished", 1));
  AddTask("task");
  EXPECT_THAT(Run(), ElementsAre("task"));
  Add("1", 1);
  queue_.AddLastTask(a_, [this] { events_.emplace_back("last"); });
  Add("after", 1);
  EXPECT_THAT(Run(), ElementsAre("1"));
  a_->EndOldest();
  a_->unfinished.push_back(Make("more", 1));
  EXPECT_THAT(Run(), ElementsAre("unfinished+more"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("last", "after"));
}

}  // namespace
}  // namespace lossd::engine::follow_ups_test
