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

TEST_F(FollowUpsTest, ALastTaskHasWhatOthersBorrowedFinishedFirstAndNothingElseStartsMeanwhile) {
  Add("under way", 1, b_);
  EXPECT_THAT(Run(), ElementsAre("under way"));
  a_->borrowers = {b_};
  queue_.AddLastTask(a_, [this] { events_.emplace_back("last"); });
  const std::shared_ptr<QueuedChunk> waiting = Make("waiting", 1);
  queue_.AddFollowUp(b_, waiting, now_);
  Add("new", 1, b_);
  const auto third = std::make_shared<RecordingSource>(&device_, &events_);
  EXPECT_THAT(Run(), IsEmpty()) << "what is under way may leave more";
  Add("other", 1, third);
  EXPECT_THAT(Run(), IsEmpty());
  b_->borrowed = {waiting, Make("of a tile", 1)};
  b_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("asked", "waiting", "of a tile"));
  b_->borrowed = {Make("more", 1)};
  b_->EndOldest();
  EXPECT_THAT(Run(), IsEmpty()) << "one is still under way";
  b_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("asked", "more"));
  b_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("asked", "last", "other", "new")) << "each once, and at b's cost";
}

TEST_F(FollowUpsTest, NobodyIsAskedBeforeATaskThatIsNoLastOne) {
  a_->borrowers = {b_};
  b_->borrowed = {Make("borrowed", 1)};
  AddTask("task");
  EXPECT_THAT(Run(), ElementsAre("task"));
}

TEST_F(FollowUpsTest, HeadsThatBorrowOfEachOtherDoNotWaitForEachOther) {
  a_->borrowers = {b_};
  b_->borrowers = {a_};
  a_->borrowed = {Make("a's", 1)};
  b_->borrowed = {Make("b's", 1)};
  queue_.AddLastTask(a_, [this] { events_.emplace_back("last of a"); });
  queue_.AddLastTask(b_, [this] { events_.emplace_back("last of b"); });
  EXPECT_THAT(Run(), ElementsAre("asked", "b's"));
  b_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("asked", "last of a", "asked", "a's"));
  a_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("asked", "last of b"));
  a_->borrowers.clear();  // they would keep each other
}

TEST_F(FollowUpsTest, WhatIsBorrowedTakesNoMoreThanTheDeviceHasRoomFor) {
  a_->borrowers = {b_};
  for (const char* name : {"1", "2", "3", "4"}) b_->borrowed.push_back(Make(name, 1));
  queue_.AddLastTask(a_, [this] { events_.emplace_back("last"); });
  EXPECT_THAT(Run(), ElementsAre("asked", "1", "2", "3"));
  b_->EndOldest();
  EXPECT_THAT(Run(), ElementsAre("4"));
}

}  // namespace
}  // namespace lossd::engine::follow_ups_test
