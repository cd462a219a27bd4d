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
  const Summary summary = RunSchedules({.seed = 1, .schedules = 500});
  EXPECT_TRUE(summary.divergent.empty()) << Text(summary);
  EXPECT_EQ(summary.schedules, 500);
  // All of it happens, and not once in a while.
  for (const char* event : {"AbortFlush",
                            "abort heard of",
                            "aborted by an operator",
                            "ApplyStep",
                            "CommitFlush",
                            "answer lost",
                            "checkpoint",
                            "client restarted",
                            "cut",
                            "delivered twice",
                            "drain",
                            "gap",
                            "head deleted",
                            "kill",
                            "late delivery",
                            "leases ended",
                            "marks refused",
                            "old call repeated",
                            "rejected chunk",
                            "reordered",
                            "repeated answer",
                            "restore",
                            "session closed",
                            "session replaced",
                            "step",
                            "rival call",
                            "stats",
                            "stream fenced",
                            "weights written",
                            "window",
                            "window lost",
                            "write begun",
                            "write ended",
                            "write forgotten",
                            "write undone",
                            "wrong generation",
                            "wrong marks"}) {
    const auto found = summary.events.find(event);
    EXPECT_GE(found == summary.events.end() ? 0 : found->second, 20) << event;
  }
}

TEST(SimulationTest, ASeedGivesTheSameRunEveryTime) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const RunOptions options{.seed = seed, .schedules = 1, .trace = true};
    const Summary first = RunSchedules(options);
    const Summary second = RunSchedules(options);
    EXPECT_EQ(first.trace, second.trace) << "seed " << seed;
    EXPECT_EQ(first.events, second.events) << "seed " << seed;
  }
}

class SabotageTest : public ::testing::TestWithParam<Sabotage> {};

TEST_P(SabotageTest, IsNoticed) {
  const Summary summary =
      RunSchedules({.seed = 1, .schedules = 200, .most_divergences = 3, .sabotage = GetParam()});
  EXPECT_GT(summary.sabotaged, 0);
  EXPECT_EQ(summary.divergent.size(), 3U) << "of " << summary.schedules << " schedules";
}

INSTANTIATE_TEST_SUITE_P(Devices, SabotageTest,
                         ::testing::Values(Sabotage::kRepeatsCount, Sabotage::kChunkLost,
                                           Sabotage::kResetForgotten, Sabotage::kStepTwice,
                                           Sabotage::kFoldLost));

}  // namespace
}  // namespace lossd::simulation::simulation_test
