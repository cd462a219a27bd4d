// Simulated schedules against the real engine: none diverges, the same seed gives the same run, and the
// oracle notices what a broken device does.
#include <gtest/gtest.h>

#include "tests/simulation/run.h"

namespace lossd::simulation::simulation_test {
namespace {

std::string Text(const Summary& summary) {
  std::string text;
  for (const auto& [seed, what] : summary.divergent) {
    text.append("seed ").append(seed).append(": ").append(what).append("\n");
  }
  for (const std::string& line : summary.trace) text.append(line).append("\n");
  return text;
}

TEST(SimulationTest, NoScheduleDiverges) {
  const Summary summary = RunSchedules({.seed = 1, .schedules = 225});
  EXPECT_TRUE(summary.divergent.empty()) << Text(summary);
  EXPECT_EQ(summary.schedules, 225);
  // All of it happens, and not once in a while.
  for (const char* event : {"AbortFlush",
                            "ApplyStep",
                            "CommitFlush",
                            "abort heard of",
                            "aborted by an operator",
                            "answer lost",
                            "checkpoint",
                            "client restarted",
                            "collective timed out",
                            "cut",
                            "delivered twice",
                            "done for a leader that is gone",
                            "drain",
                            "epoch ended by a failure",
                            "epoch ended by silence",
                            "epoch",
                            "gap",
                            "head deleted",
                            "kill",
                            "late command refused",
                            "late delivery",
                            "late report refused",
                            "leader hears nothing",
                            "leases ended",
                            "loss noticed by the leader",
                            "loss noticed by the rank",
                            "mark checked",
                            "marks refused",
                            "old call repeated",
                            "partition healed",
                            "rank hears nothing",
                            "rank killed in a collective",
                            "rank killed",
                            "rank lags",
                            "rank of an old epoch is there",
                            "rejected chunk",
                            "reordered",
                            "replica killed",
                            "repeated answer",
                            "repeated hello refused",
                            "restore",
                            "rival call",
                            "session closed",
                            "session replaced",
                            "set cut",
                            "set goes back",
                            "set goes on",
                            "set meets broken",
                            "stats",
                            "step",
                            "stream fenced",
                            "weights written",
                            "window lost",
                            "window",
                            "write begun",
                            "write ended",
                            "write forgotten",
                            "write interrupted",
                            "write undone",
                            "wrong generation",
                            "wrong marks"}) {
    const auto found = summary.events.find(event);
    EXPECT_GE(found == summary.events.end() ? 0 : found->second, 3) << event;
  }
}

TEST(SimulationTest, ASeedGivesTheSameRunEveryTime) {
  for (uint64_t seed = 1; seed <= 13; ++seed) {
    const RunOptions options{.seed = seed, .schedules = 1, .trace = true};
    const Summary first = RunSchedules(options);
    const Summary second = RunSchedules(options);
    EXPECT_EQ(first.trace, second.trace) << "seed " << seed;
    EXPECT_EQ(first.events, second.events) << "seed " << seed;
  }
}

// Hundreds of schedules each: what a broken device does is nothing for sanitizers to look at.
#if !defined(__SANITIZE_ADDRESS__)
class SabotageTest : public ::testing::TestWithParam<Sabotage> {};

TEST_P(SabotageTest, IsNoticed) {
  const bool of_replicas = GetParam() >= Sabotage::kReplicaLeftOut;
  const Summary summary = RunSchedules({.seed = 1,
                                        .schedules = 800,
                                        .most_divergences = 1,
                                        .replicas = of_replicas ? Replicas::kAll : Replicas::kNone,
                                        .sabotage = GetParam()});
  EXPECT_GT(summary.sabotaged, 0);
  EXPECT_EQ(summary.divergent.size(), 1U) << "of " << summary.schedules << " schedules";
}

INSTANTIATE_TEST_SUITE_P(Devices, SabotageTest,
                         ::testing::Values(Sabotage::kRepeatsCount, Sabotage::kChunkLost,
                                           Sabotage::kResetForgotten, Sabotage::kStepTwice,
                                           Sabotage::kFoldLost, Sabotage::kMarkBeforeRanks,
                                           Sabotage::kRankSkipsBatch, Sabotage::kOldEpochCounts,
                                           Sabotage::kMarkWithoutLost, Sabotage::kReplicaLeftOut,
                                           Sabotage::kGatherForgotten, Sabotage::kBrokenForgotten));
#endif

}  // namespace
}  // namespace lossd::simulation::simulation_test
