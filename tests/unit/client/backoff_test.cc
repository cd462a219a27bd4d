// How long the client waits between two tries.
#include "client/src/connection/backoff.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "tests/support/wait.h"

namespace lossd::internal::backoff_test {
namespace {

using std::chrono::milliseconds;

TEST(BackoffTest, WaitsAtLeastAsLongAsTheServerAsks) {
  Backoff backoff{std::chrono::hours(1)};
  EXPECT_GE(backoff.NextDelay(milliseconds(100)), milliseconds(100));
}

TEST(BackoffTest, GivesUpAtOnceIfTheServerAsksForMoreThanIsLeft) {
  Backoff backoff{std::chrono::hours(1)};
  EXPECT_EQ(backoff.NextDelay(std::chrono::hours(2)), std::nullopt);
}

TEST(BackoffTest, ThoseThatAreSentAwayTogetherComeBackAtDifferentTimes) {
  const auto delay = [] {
    Backoff backoff{std::chrono::hours(1)};
    return backoff.NextDelay(milliseconds(100)).value();
  };
  milliseconds least = delay();
  milliseconds most = least;
  testing::Await("delays that differ", [&] {
    const milliseconds now = delay();
    least = std::min(least, now);
    most = std::max(most, now);
    return most >= least + milliseconds(5);
  });
}

}  // namespace
}  // namespace lossd::internal::backoff_test
