#include "server/startup/group/parted_ranks.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <optional>

namespace lossd::parted_ranks_test {
namespace {

using engine::RankActivity;
using kernels::Exchange;

class PartedRanksTest : public ::testing::Test {
 protected:
  PartedRanksTest() {
    group_.patience = absl::Seconds(60);
    group_.ranks.resize(3);
  }
  RankActivity& activity(size_t rank) { return group_.ranks[rank].activity; }
  void AllWaitAt(std::optional<Exchange> exchange) {
    for (size_t rank = 0; rank < group_.ranks.size(); ++rank) activity(rank).waits_at = exchange;
  }
  // The rank has been through one more exchange.
  void ComesOn(size_t rank) {
    RankActivity& its = activity(rank);
    its.waits[0] = {{}, its.waits[0].sum() + 0.001};
  }
  void LookFor(int seconds) {
    for (int i = 0; i < seconds; ++i) ranks_.Look(group_, now_ += std::chrono::seconds(1));
  }

  engine::GroupReport group_;
  bool parted_ = false;

 private:
  PartedRanks ranks_{[this] { parted_ = true; }};
  PartedRanks::Clock::time_point now_;
};

TEST_F(PartedRanksTest, AllThatWaitForEachOtherAndNeverComeOnAreParted) {
  AllWaitAt(Exchange::kHiddenStates);
  LookFor(60);
  EXPECT_FALSE(parted_);
  LookFor(2);
  EXPECT_TRUE(parted_);
}

TEST_F(PartedRanksTest, ARankThatIsSlowHasItsTime) {
  AllWaitAt(Exchange::kHiddenStates);
  activity(1).waits_at.reset();
  LookFor(1000);
  EXPECT_FALSE(parted_);
}

TEST_F(PartedRanksTest, RanksThatComeOnWaitForSomethingElseEachTime) {
  AllWaitAt(Exchange::kInputGradients);
  for (int exchange = 0; exchange < 10; ++exchange) {
    LookFor(40);
    ComesOn(2);
  }
  EXPECT_FALSE(parted_);
}

TEST_F(PartedRanksTest, TimeCountsAnewWhenAllWaitAgain) {
  AllWaitAt(Exchange::kRows);
  LookFor(40);
  AllWaitAt(std::nullopt);
  LookFor(1);
  AllWaitAt(Exchange::kRows);
  LookFor(40);
  EXPECT_FALSE(parted_);
}

TEST_F(PartedRanksTest, ADeviceThatIsNoGroupIsNeverParted) {
  group_.ranks.resize(1);
  AllWaitAt(Exchange::kRows);
  LookFor(1000);
  EXPECT_FALSE(parted_);
}

}  // namespace
}  // namespace lossd::parted_ranks_test
