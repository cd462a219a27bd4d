#include "server/startup/group/stuck_ranks.h"

#include <gtest/gtest.h>

#include <vector>

namespace lossd::stuck_ranks_test {
namespace {

TEST(StuckRanks, TellsWhenTheFirstRankIsStuckAndWhenNoneIsAnyMore) {
  engine::GroupReport group;
  group.patience = absl::Seconds(60);
  group.ranks.resize(3);
  const auto is_for = [&group](size_t rank, double seconds) {
    engine::RankActivity& activity = group.ranks[rank].activity;
    activity.command = seconds > 0 ? "StartBatch" : "";
    activity.command_seconds = seconds;
  };
  std::vector<bool> told;
  StuckRanks stuck([&told](bool ready) { told.push_back(ready); });
  stuck.Look(group);
  is_for(1, 59);
  stuck.Look(group);
  EXPECT_EQ(told, std::vector<bool>()) << "it may be at something large";
  is_for(1, 61);
  stuck.Look(group);
  stuck.Look(group);
  EXPECT_EQ(told, std::vector<bool>({false}));
  is_for(0, 61);
  is_for(1, 0);
  stuck.Look(group);
  EXPECT_EQ(told, std::vector<bool>({false})) << "another one is";
  is_for(0, 0);
  stuck.Look(group);
  EXPECT_EQ(told, std::vector<bool>({false, true}));
}

TEST(StuckRanks, ADeviceThatIsNoGroupIsNeverStuck) {
  StuckRanks stuck([](bool /*ready*/) { FAIL(); });
  stuck.Look({});
}

}  // namespace
}  // namespace lossd::stuck_ranks_test
