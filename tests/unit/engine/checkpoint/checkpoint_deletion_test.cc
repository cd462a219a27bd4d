// Checkpoints that go: for good, whatever fails, and only those that are meant.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/unit/engine/checkpoint/checkpoint_store_fixture.h"

namespace lossd::engine::checkpoint_deletion_test {
namespace {

namespace fs = std::filesystem;

class CheckpointDeletionTest : public checkpoint_store_test::CheckpointStoreTest {};

TEST_F(CheckpointDeletionTest, ADeletedCheckpointIsGoneAndOthersKeepWhatTheyShareWithIt) {
  ASSERT_TRUE(Save("a", 1, 'x', "version 1").ok());
  ASSERT_TRUE(Save("b", 2, 'x', "version 1").ok());
  const auto before = store_->Measure();
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_EQ(before->all, before->alone);
  const absl::StatusOr<DeletedCheckpoint> deleted = store_->Delete("h", "b");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->info.generation, 2U);
  EXPECT_GT(deleted->bytes_freed, 0);
  EXPECT_EQ(store_->Measure()->all, before->all - deleted->bytes_freed);
  EXPECT_TRUE(Find("a").ok());
  EXPECT_TRUE(absl::IsNotFound(Find("b").status()));
  for (const std::string& tag : {std::string("b"), std::string("c")}) {
    EXPECT_TRUE(absl::IsNotFound(store_->Delete("h", tag).status())) << tag;
  }
  EXPECT_TRUE(absl::IsNotFound(store_->Delete("other", "a").status()));
  for (const std::string& name :
       {std::string(), std::string(".."), std::string(kDrainTag), std::string("a/b")}) {
    EXPECT_TRUE(absl::IsInvalidArgument(store_->Delete("h", name).status())) << name;
    EXPECT_TRUE(absl::IsInvalidArgument(store_->Delete(name, "a").status())) << name;
  }
  // The file that the next one would share is written once more.
  ASSERT_TRUE(Save("c", 3, 'x', "version 1").ok());
  EXPECT_TRUE(Find("c").ok());
  EXPECT_TRUE(Find("a").ok());
}

TEST_F(CheckpointDeletionTest, ADamagedCheckpointCanBeDeleted) {
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  CheckpointFolder::Write(folder_ / "heads/h/a/manifest.json", "{}");
  const absl::StatusOr<DeletedCheckpoint> deleted = store_->Delete("h", "a");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->info.tag, "a");
  EXPECT_FALSE(fs::exists(folder_ / "heads/h/a"));
}

// Every step of a deletion fails once: the checkpoint is there whole, or not at all and for good.
TEST_F(CheckpointDeletionTest, WhateverStepOfADeletionFailsItIsThereWholeOrNotAtAll) {
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  steps_ = 0;
  ASSERT_TRUE(store_->Delete("h", "a").ok());
  const int steps = steps_;
  ASSERT_GT(steps, 5);
  for (int step = 1; step <= steps; ++step) {
    SCOPED_TRACE(step);
    ASSERT_TRUE(Save("a", 1, 'x').ok());
    steps_ = 0;
    failing_step_ = step;
    const absl::StatusOr<DeletedCheckpoint> deleted = store_->Delete("h", "a");
    failing_step_ = 0;
    Open();  // as after a crash
    const absl::Status found = Find("a").status();
    EXPECT_TRUE(found.ok() || absl::IsNotFound(found)) << found;
    if (deleted.ok()) {
      EXPECT_TRUE(absl::IsNotFound(found)) << "said to be deleted";
      EXPECT_EQ(deleted->bytes_freed, 0) << "until the next start removes its files";
    }
    if (step == 1) {
      EXPECT_FALSE(deleted.ok());
    }
    EXPECT_EQ(store_->List("")->size(), found.ok() ? 1U : 0U);
    EXPECT_FALSE(fs::exists(folder_ / "heads/h/.tmp-a"));
  }
}

TEST_F(CheckpointDeletionTest, ARowIsThoseOfOnePrefixAndTheNewestAreThoseSavedLast) {
  for (const std::string& tag :
       {std::string("step-9"), std::string("step-10"), std::string("step-8"), std::string("best-1"),
        std::string("best"), std::string("step-9-1"), std::string("step-x"), std::string("step9"),
        std::string("step-"), std::string(kDrainTag)}) {
    ASSERT_TRUE(Save(tag, 1, 'x').ok()) << tag;
  }
  using Tags = std::vector<std::string>;
  EXPECT_EQ(*store_->BeyondNewest("h", "step-8", 1), (Tags{"step-10", "step-9"}));
  EXPECT_EQ(*store_->BeyondNewest("h", "step-8", 2), (Tags{"step-9"}));
  EXPECT_EQ(*store_->BeyondNewest("h", "step-77", 3), Tags{});
  for (const std::string& tag : {std::string("best-1"), std::string("best"), std::string("step-x"),
                                 std::string("step9"), std::string("step-"), std::string("step-9-1"),
                                 std::string(kDrainTag), std::string("7"), std::string()}) {
    EXPECT_EQ(*store_->BeyondNewest("h", tag, 1), Tags{}) << tag;
  }
  // Saved again it is the newest, whatever its number.
  ASSERT_TRUE(Save("step-9", 2, 'x').ok());
  EXPECT_EQ(*store_->BeyondNewest("h", "step-9", 1), (Tags{"step-8", "step-10"}));
  // One that cannot be read is neither counted nor deleted.
  CheckpointFolder::Write(folder_ / "heads/h/step-8/manifest.json", "{}");
  EXPECT_EQ(*store_->BeyondNewest("h", "step-9", 1), (Tags{"step-10"}));
}

TEST_F(CheckpointDeletionTest, TheDiskSaysHowMuchIsFreeAndInAll) {
  const auto space = store_->Space();
  ASSERT_TRUE(space.ok()) << space.status();
  EXPECT_GT(space->total, 0);
  EXPECT_GE(space->free, 0);
  EXPECT_LE(space->free, space->total);
}

}  // namespace
}  // namespace lossd::engine::checkpoint_deletion_test
