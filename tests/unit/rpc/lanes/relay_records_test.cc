#include "server/rpc/lanes/relay_records.h"

#include <gtest/gtest.h>

#include <optional>

namespace lossd::rpc::relay_records_test {
namespace {

constexpr RelayKey kKey = {.rank = 1, .relay = 4};

class RelayRecordsTest : public ::testing::Test {
 protected:
  // What Settle has told; none: it has not.
  std::optional<uint64_t> told_;
  RelayRecords records_;

  void Settle(const RelayKey& key = kKey) {
    records_.Settle(key, [this](uint64_t last) { told_ = last; });
  }
};

TEST_F(RelayRecordsTest, ARelayIsSettledWhenItIsOver) {
  ASSERT_TRUE(records_.Begin(kKey).ok());
  ASSERT_TRUE(records_.Note(kKey, 3).ok());
  Settle();
  EXPECT_FALSE(told_.has_value());
  ASSERT_TRUE(records_.Note(kKey, 8).ok());
  records_.End(kKey);
  EXPECT_EQ(told_, 8U);
}

TEST_F(RelayRecordsTest, OneThatIsOverIsRememberedUntilItIsSettled) {
  ASSERT_TRUE(records_.Begin(kKey).ok());
  ASSERT_TRUE(records_.Note(kKey, 3).ok());
  records_.End(kKey);
  EXPECT_FALSE(records_.Begin(kKey).ok());
  Settle();
  EXPECT_EQ(told_, 3U);
  Settle();
  EXPECT_EQ(told_, 0U) << "it is forgotten";
}

TEST_F(RelayRecordsTest, OneWithoutAPayloadIsNotRemembered) {
  ASSERT_TRUE(records_.Begin(kKey).ok());
  records_.End(kKey);
  EXPECT_TRUE(records_.Begin(kKey).ok());
}

TEST_F(RelayRecordsTest, OneThatNeverBeganHasNothing) {
  Settle({.rank = 2, .relay = 1});
  EXPECT_EQ(told_, 0U);
}

TEST_F(RelayRecordsTest, RanksCountForThemselves) {
  ASSERT_TRUE(records_.Begin(kKey).ok());
  ASSERT_TRUE(records_.Begin({.rank = 2, .relay = kKey.relay}).ok());
  ASSERT_TRUE(records_.Note(kKey, 9).ok());
  EXPECT_TRUE(records_.Note({.rank = 2, .relay = kKey.relay}, 1).ok());
}

TEST_F(RelayRecordsTest, NumbersGoUp) {
  ASSERT_TRUE(records_.Begin(kKey).ok());
  ASSERT_TRUE(records_.Note(kKey, 3).ok());
  EXPECT_FALSE(records_.Note(kKey, 3).ok());
  EXPECT_FALSE(records_.Note(kKey, 2).ok());
  EXPECT_TRUE(records_.Note(kKey, 4).ok());
}

}  // namespace
}  // namespace lossd::rpc::relay_records_test
