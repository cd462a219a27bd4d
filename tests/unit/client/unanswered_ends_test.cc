// What a client remembers of ends of windows that it got no answer to.
#include "client/src/common/unanswered_ends.h"

#include <gtest/gtest.h>

#include <optional>

namespace lossd::unanswered_ends_test {
namespace {

using internal::OpenCommit;
using internal::OpenStep;
using internal::UnansweredEnds;
using internal::UnansweredEndsMap;

OpenCommit CommitAt(const char* incarnation) {
  return {.flush = {.flush_id = "f"}, .life = {.incarnation = incarnation}, .marks = {}};
}

TEST(UnansweredEndsTest, AStepIsThatOfTheServerThatWasAsked) {
  UnansweredEnds ends;
  ends.SetStep(OpenStep{7, {"old"}});
  EXPECT_EQ(ends.StepAt({"old"}), 7U);
  EXPECT_EQ(ends.StepAt({"new"}), std::nullopt);
}

TEST(UnansweredEndsTest, AHandleThatLearnsOfAServerLateKeepsWhatAnotherLeftOpenThere) {
  UnansweredEnds ends;
  ends.SetStep(OpenStep{7, {"new"}});
  ends.SetCommit(CommitAt("new"));
  ends.KeepOnly({"new"});
  EXPECT_EQ(ends.StepAt({"new"}), 7U);
  EXPECT_TRUE(ends.commit().has_value());
}

TEST(UnansweredEndsTest, WhatAServerBeforeWasAskedForIsForgotten) {
  UnansweredEnds ends;
  ends.SetStep(OpenStep{7, {"old"}});
  ends.SetCommit(CommitAt("old"));
  ends.KeepOnly({"new"});
  EXPECT_EQ(ends.StepAt({"old"}), std::nullopt);
  EXPECT_FALSE(ends.commit().has_value());
}

TEST(UnansweredEndsTest, ADeletedHeadsHandlesGoOnSharingTheirs) {
  UnansweredEndsMap heads;
  const auto before = heads.Of("h");
  before->SetCommit(CommitAt("i"));
  heads.Of("other")->SetCommit(CommitAt("i"));
  heads.Clear("h");
  EXPECT_FALSE(before->commit().has_value());
  EXPECT_EQ(heads.Of("h"), before);
  EXPECT_TRUE(heads.Of("other")->commit().has_value());
}

}  // namespace
}  // namespace lossd::unanswered_ends_test
