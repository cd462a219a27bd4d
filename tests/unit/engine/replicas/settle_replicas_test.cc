#include "server/engine/replicas/settle_replicas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace lossd::engine::settle_replicas_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using enum EndingPhase;

constexpr uint64_t kHistory = 77;

ReplicaState At(uint64_t generation, EndingPhase phase, std::string flush_id = "") {
  return {.holds = true,
          .history = kHistory,
          .generation = generation,
          .phase = phase,
          .flush_id = std::move(flush_id)};
}

ReplicaState Empty() { return {}; }

ReplicaState Took(ReplicaState state, int32_t sessions_of) {
  state.took_sessions_of.push_back(sessions_of);
  return state;
}

Settlement Settled(const std::vector<ReplicaState>& states) {
  const absl::StatusOr<Settlement> settlement = SettleReplicas(states);
  EXPECT_TRUE(settlement.ok()) << settlement.status();
  return settlement.value_or(Settlement{});
}

void ExpectSettled(const std::vector<ReplicaState>& states, Verdict verdict, uint64_t generation) {
  const Settlement settlement = Settled(states);
  EXPECT_EQ(settlement.verdict, verdict);
  EXPECT_EQ(settlement.generation, generation);
}

void ExpectRefused(const std::vector<ReplicaState>& states, absl::StatusCode code, const std::string& why) {
  const absl::Status refused = SettleReplicas(states).status();
  EXPECT_EQ(refused.code(), code) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(why));
}

TEST(SettleReplicas, WindowsThatNobodyEndsStayOpen) {
  ExpectSettled({At(4, kOpen), At(4, kOpen)}, Verdict::kDrop, 4);
  ExpectSettled({At(4, kOpen)}, Verdict::kDrop, 4);
}

TEST(SettleReplicas, AStepThatNotAllHaveSumsForIsDropped) {
  ExpectSettled({At(4, kSealed), At(4, kOpen)}, Verdict::kDrop, 4);
  ExpectSettled({At(4, kSummed), At(4, kSealed)}, Verdict::kDrop, 4);
  ExpectSettled({At(4, kSummed), At(4, kSummed), At(4, kSealed)}, Verdict::kDrop, 4);
}

TEST(SettleReplicas, AStepThatAllSurvivorsHaveSumsForIsTaken) {
  ExpectSettled({At(4, kSummed), At(4, kSummed)}, Verdict::kGoOn, 5);
  ExpectSettled({At(4, kSummed), Empty()}, Verdict::kGoOn, 5);
  ExpectSettled({At(4, kStepping), At(4, kSummed)}, Verdict::kGoOn, 5);
}

TEST(SettleReplicas, AStepThatOneHasPublishedIsTakenByAll) {
  ExpectSettled({At(5, kOpen), At(4, kSummed)}, Verdict::kGoOn, 5);
  ExpectSettled({At(4, kStepping), Empty(), At(5, kOpen)}, Verdict::kGoOn, 5);
}

TEST(SettleReplicas, AFlushThatAllHaveSumsForStaysUnderItsId) {
  const Settlement settlement = Settled({At(4, kSummed, "f"), At(4, kSummed, "f")});
  EXPECT_EQ(settlement.verdict, Verdict::kGoOn);
  EXPECT_EQ(settlement.generation, 4);
  EXPECT_EQ(settlement.flush_id, "f");
}

TEST(SettleReplicas, WhatOneKnowsOfAFlushHoldsForAll) {
  for (const ReplicaState& one : {At(4, kCommitting, "f"), At(5, kOpen)}) {
    const Settlement settlement = Settled({one, At(4, kSummed, "f")});
    EXPECT_EQ(settlement.verdict, Verdict::kCommit);
    EXPECT_EQ(settlement.generation, 5);
    EXPECT_EQ(settlement.flush_id, "f");
  }
  ExpectSettled({At(4, kAborting, "f"), At(4, kSummed, "f")}, Verdict::kDrop, 4);
  ExpectSettled({At(4, kOpen), At(4, kSummed, "f")}, Verdict::kDrop, 4);
}

TEST(SettleReplicas, WhoIsEmptyIsFilledWhileANeighbourHasEachOfItsSlices) {
  EXPECT_THAT(Settled({At(4, kOpen), Empty(), At(4, kOpen)}).refilled, ElementsAre(false, true, false));
  EXPECT_EQ(Settled({Empty(), At(4, kOpen), Empty(), At(4, kOpen)}).verdict, Verdict::kDrop);
  EXPECT_EQ(Settled({Empty(), Empty(), At(4, kOpen)}).verdict, Verdict::kRestore);
  EXPECT_EQ(Settled({Empty(), At(4, kOpen), Empty()}).verdict, Verdict::kRestore);  // the last and the first
  EXPECT_EQ(Settled({Empty(), Empty()}).verdict, Verdict::kRestore);
  EXPECT_EQ(Settled({Empty()}).verdict, Verdict::kRestore);
}

TEST(SettleReplicas, WindowsWhoseSessionsWentElsewhereAreDropped) {
  EXPECT_THAT(Settled({Took(At(4, kOpen), 1), At(4, kOpen)}).fenced, ElementsAre(false, true));
  EXPECT_THAT(Settled({Took(At(4, kOpen), 1), Empty()}).fenced, ElementsAre(false, false));
  EXPECT_THAT(Settled({Took(At(4, kOpen), 9), At(4, kOpen)}).fenced, ElementsAre(false, false));
  ExpectRefused({Took(At(4, kSummed), 1), At(4, kSummed)}, absl::StatusCode::kInternal, "taken sessions");
}

TEST(SettleReplicas, ReplicasOfOtherHistoriesAreRefused) {
  ReplicaState other = At(4, kOpen);
  other.history = 78;
  ExpectRefused({At(4, kOpen), other}, absl::StatusCode::kFailedPrecondition, "replicas 0 and 1");
  other.holds = false;
  EXPECT_EQ(Settled({At(4, kOpen), other}).verdict, Verdict::kDrop);
}

TEST(SettleReplicas, WhatCannotBeIsNotDecided) {
  ExpectRefused({At(4, kOpen), At(6, kOpen)}, absl::StatusCode::kInternal, "its window is 4");
  ExpectRefused({At(5, kOpen), At(4, kSealed)}, absl::StatusCode::kInternal, "has no sum");
  ExpectRefused({At(4, kCommitting, "f"), At(4, kSealed)}, absl::StatusCode::kInternal, "has no sum");
  ExpectRefused({At(5, kSealed), At(4, kSummed)}, absl::StatusCode::kInternal, "ends a window");
  ExpectRefused({At(4, kSummed, "f"), At(4, kSummed, "g")}, absl::StatusCode::kInternal, "flush 'f'");
}

// Whatever three replicas say: nobody goes back, no window is ended without the sums of all that are not
// ahead, and the order of the replicas is nothing to go by.
TEST(SettleReplicas, EveryStateIsDecidedOrRefused) {
  std::vector<ReplicaState> all = {Empty()};
  for (const uint64_t generation : {4, 5}) {
    for (const EndingPhase phase : {kOpen, kSealed, kSummed, kStepping, kCommitting, kAborting}) {
      const bool of_flush = phase == kCommitting || phase == kAborting;
      if (!of_flush) all.push_back(At(generation, phase));
      if (phase != kOpen && phase != kStepping) all.push_back(At(generation, phase, "f"));
    }
  }
  int decided = 0;
  for (const ReplicaState& a : all) {
    for (const ReplicaState& b : all) {
      for (const ReplicaState& c : all) {
        const std::vector<ReplicaState> states = {a, b, c};
        const absl::StatusOr<Settlement> settlement = SettleReplicas(states);
        const absl::StatusOr<Settlement> turned = SettleReplicas(std::vector<ReplicaState>{b, c, a});
        ASSERT_EQ(settlement.status().code(), turned.status().code());
        if (!settlement.ok()) continue;
        ++decided;
        EXPECT_EQ(settlement->verdict, turned->verdict);
        EXPECT_EQ(settlement->generation, turned->generation);
        if (settlement->verdict == Verdict::kRestore) continue;
        for (const ReplicaState& state : states) {
          if (!state.holds) continue;
          EXPECT_GE(settlement->generation, state.generation);
          EXPECT_LE(settlement->generation, state.generation + 1);
          const bool has_sums =
              state.phase == kSummed || state.phase == kStepping || state.phase == kCommitting;
          const bool ends = settlement->generation > state.generation;
          EXPECT_TRUE(has_sums || !ends);
          EXPECT_TRUE(state.phase != kStepping || ends);
        }
      }
    }
  }
  EXPECT_GT(decided, 100);
}

}  // namespace
}  // namespace lossd::engine::settle_replicas_test
