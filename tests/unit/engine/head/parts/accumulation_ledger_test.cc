#include "server/engine/head/parts/accumulation_ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lossd::engine::accumulation_ledger_test {
namespace {

using Lane = AccumulationLedger::Lane;
using Place = AccumulationLedger::Place;

void AcceptMany(Lane& lane, int count) {
  for (int i = 0; i < count; ++i) AccumulationLedger::Accept(lane);
}

void ApplyMany(Lane& lane, int count) {
  for (int i = 0; i < count; ++i) {
    AccumulationLedger::Start(lane);
    AccumulationLedger::Apply(lane);
  }
}

TEST(AccumulationLedger, TakesOnlyTheNextSequence) {
  Lane lane;
  AcceptMany(lane, 3);
  EXPECT_EQ(AccumulationLedger::Classify(lane, 1), Place::kRepeat);
  EXPECT_EQ(AccumulationLedger::Classify(lane, 3), Place::kRepeat);
  EXPECT_EQ(AccumulationLedger::Classify(lane, 4), Place::kNext);
  EXPECT_EQ(AccumulationLedger::Classify(lane, 5), Place::kGap);
  EXPECT_EQ(AccumulationLedger::Classify(lane, UINT64_MAX), Place::kGap);
}

TEST(AccumulationLedger, WithdrawingGoesBackToTheLastStartedOne) {
  Lane lane;
  AcceptMany(lane, 5);
  ApplyMany(lane, 1);
  AccumulationLedger::Start(lane);
  EXPECT_EQ(AccumulationLedger::Withdraw(lane), 3U);
  EXPECT_EQ(lane.accepted, 2U);  // 1 is applied, 2 is started and will finish
  EXPECT_EQ(AccumulationLedger::Classify(lane, 3), Place::kNext);
  AccumulationLedger::Apply(lane);
  EXPECT_EQ(lane.applied, lane.accepted);
}

TEST(AccumulationLedger, WhatComesInPlaceOfWithdrawnLossesThatAStepNamedIsNamedAgain) {
  AccumulationLedger ledger;
  AccumulationLedger::Session& session = ledger.Add("a", "client a", 0, 1);
  Lane& lane = session.lanes[0];
  AcceptMany(lane, 5);
  ApplyMany(lane, 2);
  lane.base = 5;  // as a repeated step leaves it that named the three which are queued
  EXPECT_EQ(AccumulationLedger::Withdraw(lane), 3U);
  EXPECT_EQ(lane.base, 2U);
  AcceptMany(lane, 1);
  EXPECT_TRUE(lane.contributed());
  EXPECT_FALSE(ledger.Match({}).ok());
}

TEST(AccumulationLedger, AFlushMustNameEveryContributionExactly) {
  AccumulationLedger ledger;
  AcceptMany(ledger.Add("a", "client a", 0, 2).lanes[1], 3);
  ledger.Add("idle", "client b", 1, 1);
  const auto match = [&](std::vector<SessionMarks> marks) {
    return std::string(ledger.Match(marks).message());
  };
  EXPECT_EQ(match({{"a", {{1, 3, 0}}}}), "");
  EXPECT_EQ(match({{"a", {{0, 0, 0}, {1, 3, 0}}}, {"idle", {{0, 0, 0}}}}), "") << "idle lanes may be named";
  EXPECT_THAT(match({}), ::testing::HasSubstr("session a (rank 0) lane 1 contributed up to 3"));
  EXPECT_THAT(match({{"a", {{1, 2, 0}}}}), ::testing::HasSubstr("accepted 2, the server has accepted 3"));
  EXPECT_THAT(match({{"a", {{1, 3, 0}, {1, 3, 0}}}}), ::testing::HasSubstr("twice"));
  EXPECT_THAT(match({{"a", {{1, 3, 0}, {2, 0, 0}}}}), ::testing::HasSubstr("lane 2"));
  EXPECT_THAT(match({{"a", {{1, 3, 0}, {-1, 0, 0}}}}), ::testing::HasSubstr("lane -1"));
  EXPECT_THAT(match({{"a", {{1, 3, 0}}}, {"idle", {{0, 1, 0}}}}), ::testing::HasSubstr("session idle"));
}

TEST(AccumulationLedger, AClosedSessionIsRememberedWhileTheWindowHoldsSomethingOfIt) {
  AccumulationLedger ledger;
  AcceptMany(ledger.Add("gave", "x", 0, 1).lanes[0], 2);
  ledger.Add("nothing", "y", 0, 1);
  ledger.Close("gave");
  ledger.Close("nothing");
  EXPECT_NE(ledger.Find("gave"), nullptr);
  EXPECT_EQ(ledger.Find("nothing"), nullptr);
  std::string id;
  EXPECT_EQ(ledger.FindByKey("x", &id), nullptr) << "a closed session is not resumed";
  ASSERT_EQ(ledger.WindowMarks().size(), 1U);
  ledger.BeginWindow();
  EXPECT_EQ(ledger.Find("gave"), nullptr);
}

TEST(AccumulationLedger, SequencesContinueAcrossWindows) {
  AccumulationLedger ledger;
  Lane& lane = ledger.Add("s", "x", 0, 1).lanes[0];
  AcceptMany(lane, 2);
  ApplyMany(lane, 2);
  EXPECT_FALSE(ledger.WindowEmpty());
  ledger.BeginWindow();
  EXPECT_TRUE(ledger.WindowEmpty());
  EXPECT_TRUE(ledger.WindowMarks().empty());
  EXPECT_EQ(AccumulationLedger::Classify(ledger.Find("s")->lanes[0], 3), Place::kNext);
  EXPECT_EQ(AccumulationLedger::Classify(ledger.Find("s")->lanes[0], 2), Place::kRepeat);
}

TEST(AccumulationLedger, SequencesThatWereRejectedForWhatMayChangeAreKnown) {
  AccumulationLedger ledger;
  Lane& lane = ledger.Add("s", "x", 0, 1).lanes[0];
  AcceptMany(lane, 5);
  for (const bool rejected : {false, true, false, true, false}) {
    AccumulationLedger::Start(lane);
    if (rejected) AccumulationLedger::Reject(lane);
    AccumulationLedger::Apply(lane);
  }
  ledger.BeginWindow();  // it may still be sent again
  for (uint64_t sequence = 1; sequence <= 6; ++sequence) {
    EXPECT_EQ(AccumulationLedger::WasRejected(lane, sequence), sequence == 2 || sequence == 4) << sequence;
  }
}

TEST(AccumulationLedger, MemoryDoesNotGrowWithTheNumberOfChunks) {
  AccumulationLedger ledger;
  Lane& lane = ledger.Add("s", "x", 0, 1).lanes[0];
  AcceptMany(lane, 100000);
  ApplyMany(lane, 100000);
  EXPECT_EQ(ledger.Find("s")->lanes.size(), 1U);
  EXPECT_EQ(lane.applied, 100000U);
}

TEST(AccumulationLedger, WhileAWindowIsSealedTheNextOneCountsFromThere) {
  AccumulationLedger ledger;
  const auto take = [&ledger](const char* session) {
    AccumulationLedger::Lane& lane = ledger.Find(session)->lanes[0];
    AccumulationLedger::Accept(lane);
    AccumulationLedger::Start(lane);
    AccumulationLedger::Apply(lane);
  };
  ledger.Add("a", "a", 0, 1);
  ledger.Add("b", "b", 1, 1);
  take("a");
  ledger.Seal();
  take("a");
  take("b");
  ledger.Add("c", "c", 2, 1);
  take("c");
  ASSERT_EQ(ledger.WindowMarks().size(), 1U);
  EXPECT_EQ(ledger.WindowMarks()[0].session_id, "a");
  EXPECT_EQ(ledger.WindowMarks()[0].lanes[0].accepted, 1U);
  EXPECT_EQ(ledger.WindowMarks()[0].lanes[0].applied, 1U);

  AccumulationLedger aborted = ledger;
  aborted.Reopen();
  EXPECT_EQ(aborted.WindowMarks().size(), 3U) << "all of it is in one window now";
  EXPECT_EQ(aborted.WindowMarks()[0].lanes[0].accepted, 2U);

  ledger.Close("b");
  ledger.BeginWindow();
  ASSERT_EQ(ledger.WindowMarks().size(), 3U);
  EXPECT_EQ(ledger.WindowMarks()[0].lanes[0].accepted, 2U);
  EXPECT_NE(ledger.Find("b"), nullptr) << "the new window holds something of it";
  ledger.BeginWindow();
  EXPECT_TRUE(ledger.WindowMarks().empty());
  EXPECT_EQ(ledger.Find("b"), nullptr);
}

}  // namespace
}  // namespace lossd::engine::accumulation_ledger_test
