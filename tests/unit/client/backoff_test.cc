// How long the client waits between two tries.
#include "client/src/connection/backoff.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

namespace lossd::internal::backoff_test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

TEST(BackoffTest, WaitsAtLeastAsLongAsTheServerAsks) {
  Backoff backoff{std::chrono::hours(1)};
  const Clock::time_point before = Clock::now();
  EXPECT_TRUE(backoff.Wait(milliseconds(100)));
  EXPECT_GE(Clock::now() - before, milliseconds(100));
}

TEST(BackoffTest, GivesUpAtOnceIfTheServerAsksForMoreThanIsLeft) {
  Backoff backoff{std::chrono::hours(1)};
  EXPECT_FALSE(backoff.Wait(std::chrono::hours(2)));  // otherwise the test hangs
}

TEST(BackoffTest, ThoseThatAreSentAwayTogetherComeBackAtDifferentTimes) {
  const auto waited = [] {
    Backoff backoff{std::chrono::hours(1)};
    const Clock::time_point before = Clock::now();
    EXPECT_TRUE(backoff.Wait(milliseconds(100)));
    return Clock::now() - before;
  };
  Clock::duration least = waited();
  Clock::duration most = least;
  while (most < least + milliseconds(5)) {  // the same each time: for ever
    const Clock::duration now = waited();
    least = std::min(least, now);
    most = std::max(most, now);
  }
}

}  // namespace
}  // namespace lossd::internal::backoff_test
