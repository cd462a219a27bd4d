// What is left of chunks that were answered, and what waits for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/engine/schedule/batch_queue_fixture.h"

namespace lossd::engine::follow_ups_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using FollowUpsTest = BatchQueueTest;

TEST_F(FollowUpsTest, ATaskWaitsForThemAndNothingThatWasGivenAfterItPasses) {
  AddFollowUp("rest", 1);
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
  AddFollowUp("rest", 1);
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("rest"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("task"));
}

TEST_F(FollowUpsTest, AFenceWaitsForThoseOfALineThatHasNothingElse) {
  AddFollowUp("rest", 1, b_);
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
