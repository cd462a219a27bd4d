#include "server/engine/head/parts/head_history.h"

#include <gtest/gtest.h>

namespace lossd::engine::head_history_test {
namespace {

constexpr uint64_t kGeneration = 3;

SessionMarks MarksOf(HeadPast past, uint64_t accepted) {
  return {"s", {{.lane = 0, .accepted = accepted}}, std::move(past)};
}

// Saved when two chunks of the one session were accepted.
Ancestor SavedAt(HeadPast past) { return {std::move(past), kGeneration, {MarksOf({}, 2)}}; }

TEST(HeadHistory, NumbersAloneAreComparedWhereNobodyKnowsWhatTheyAreOf) {
  const HeadHistory history("a");
  EXPECT_TRUE(history.Has(kGeneration, MarksOf({}, 7)));
  EXPECT_TRUE(history.Has(kGeneration, MarksOf({"a", 0}, 7)));
  EXPECT_FALSE(history.Has(kGeneration, MarksOf({"a", 1}, 7)));
  EXPECT_FALSE(history.Has(kGeneration, MarksOf({"b", 0}, 7)));
}

TEST(HeadHistory, WhatACheckpointHasMeansTheSameBehindItsRestore) {
  HeadHistory history("b");
  history.Restore(1, {}, SavedAt({"a", 0}));
  EXPECT_EQ(history.now(), (HeadPast{"b", 1}));
  EXPECT_TRUE(history.Has(kGeneration, MarksOf({"a", 0}, 2)));
  EXPECT_FALSE(history.Has(kGeneration, MarksOf({"a", 0}, 3))) << "accepted after it was saved";
  EXPECT_FALSE(history.Has(kGeneration + 1, MarksOf({"a", 0}, 2))) << "another window";
  EXPECT_FALSE(history.Has(kGeneration, {"other", {{.lane = 0, .accepted = 1}}, {"a", 0}}));
  EXPECT_TRUE(history.Has(kGeneration, {"other", {{.lane = 0, .accepted = 0}}, {"a", 0}}));
  EXPECT_FALSE(history.Has(kGeneration, {"s", {{.lane = 1, .accepted = 1}}, {"a", 0}}));
  EXPECT_TRUE(history.Has(kGeneration, MarksOf({"b", 1}, 7)));
}

TEST(HeadHistory, WhoKnowsTheWindowToBeOverDoesNotEndItAgain) {
  HeadHistory history("b");
  history.Restore(1, {}, SavedAt({"a", 0}));
  SessionMarks marks = MarksOf({"a", 0}, 2);
  marks.generation = kGeneration;
  EXPECT_TRUE(history.Has(kGeneration, marks));
  marks.generation = kGeneration + 1;
  EXPECT_FALSE(history.Has(kGeneration, marks));
}

TEST(HeadHistory, APastThatWasGivenUpIsNoAncestor) {
  HeadHistory history("a");
  history.Restore(1, {}, SavedAt({"a", 0}));
  history.Restore(2, {}, SavedAt({"a", 0}));  // not that of `a`, 1, which went on from there
  EXPECT_FALSE(history.Has(kGeneration, MarksOf({"a", 1}, 2)));
  EXPECT_TRUE(history.Has(kGeneration, MarksOf({"a", 0}, 2)));
}

TEST(HeadHistory, AncestorsOfACheckpointAreThoseOfTheHead) {
  HeadHistory first("a");
  first.Restore(1, {}, SavedAt({"before", 0}));
  HeadHistory history("c");
  history.Restore(2, first.ancestors(), {first.now(), kGeneration, {MarksOf({}, 4)}});
  EXPECT_TRUE(history.Has(kGeneration, MarksOf({"before", 0}, 2)));
  EXPECT_FALSE(history.Has(kGeneration, MarksOf({"before", 0}, 4)));
  EXPECT_TRUE(history.Has(kGeneration, MarksOf({"a", 1}, 4)));

  HeadHistory drained("c");
  drained.Continue(2, history.ancestors());
  EXPECT_EQ(drained.now(), history.now());
  EXPECT_TRUE(drained.Has(kGeneration, MarksOf({"a", 1}, 4)));
}

TEST(HeadHistory, ANewWindowComesFromNoOtherPast) {
  HeadHistory history("a");
  history.Restore(1, {}, SavedAt({"a", 0}));
  EXPECT_EQ(history.restored_from(), 0U);
  history.BeginWindow();
  EXPECT_EQ(history.restored_from(), std::nullopt);
  EXPECT_FALSE(history.Has(kGeneration, MarksOf({"a", 0}, 2)));
  EXPECT_EQ(history.restores(), 1U);
}

TEST(HeadHistory, WhatAnotherIncarnationHadSavedTellsNoSessionThatItGoesOn) {
  HeadHistory history("b");
  history.Restore(1, {}, SavedAt({"a", 0}));
  EXPECT_EQ(history.restored_from(), std::nullopt);
}

TEST(HeadHistory, OnlyTheLastRestoresOfAWindowAreKept) {
  HeadHistory history("a");
  for (uint64_t restores = 0; restores < 100; ++restores) {
    history.Restore(restores + 1, history.ancestors(), SavedAt({"a", restores}));
  }
  EXPECT_EQ(history.ancestors().size(), 8U);
  EXPECT_FALSE(history.Has(kGeneration, MarksOf({"a", 0}, 2)));
  EXPECT_TRUE(history.Has(kGeneration, MarksOf({"a", 99}, 2)));
  history.Restore(101, std::vector<Ancestor>(1000, SavedAt({"a", 0})), SavedAt({"a", 99}));
  EXPECT_EQ(history.ancestors().size(), 8U);
}

}  // namespace
}  // namespace lossd::engine::head_history_test
