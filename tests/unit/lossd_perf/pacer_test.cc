// When batches are due.
#include "client/tools/perf/pacer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

namespace lossd::perf::pacer_test {
namespace {

using std::chrono::hours;
using std::chrono::seconds;

TEST(PoissonArrivalsTest, SameSeedSameArrivals) {
  const Amount amount{.duration = 100};
  EXPECT_EQ(PoissonArrivals(5, amount, 1), PoissonArrivals(5, amount, 1));
  EXPECT_NE(PoissonArrivals(5, amount, 1), PoissonArrivals(5, amount, 2));
}

TEST(PoissonArrivalsTest, ExponentialGapsOfTheGivenRate) {
  constexpr double kRate = 50;
  const std::vector<double> arrivals = PoissonArrivals(kRate, {.batches = 20000}, 3);
  ASSERT_EQ(arrivals.size(), 20000u);
  EXPECT_TRUE(std::is_sorted(arrivals.begin(), arrivals.end()));
  EXPECT_NEAR(arrivals.back() * kRate / 20000, 1, 0.03);  // four standard deviations
  int64_t longer = 0;
  for (size_t i = 1; i < arrivals.size(); ++i) {
    if (arrivals[i] - arrivals[i - 1] > 1 / kRate) ++longer;
  }
  EXPECT_NEAR(static_cast<double>(longer) / 20000, 0.3679, 0.015);  // 1/e of an exponential distribution
}

TEST(PoissonArrivalsTest, NoneAfterTheDuration) {
  const std::vector<double> arrivals = PoissonArrivals(100, {.duration = 10}, 4);
  EXPECT_LT(arrivals.back(), 10);
  EXPECT_NEAR(static_cast<double>(arrivals.size()), 1000, 130);
}

TEST(PacerTest, ALateBatchIsDueWhenItArrivedNotWhenAClientWasFree) {
  const Amount amount{.duration = 60};
  Pacer pacer(1, amount, 5);
  const std::vector<double> arrivals = PoissonArrivals(1, amount, 5);
  const Clock::time_point start = Clock::now() - seconds(60);  // all have arrived
  pacer.Start(start);
  for (const double arrival : arrivals) {
    const std::optional<Clock::time_point> due = pacer.Next();
    ASSERT_TRUE(due.has_value());
    EXPECT_NEAR(std::chrono::duration<double>(*due - start).count(), arrival, 1e-6);
  }
  EXPECT_FALSE(pacer.Next().has_value());
  EXPECT_TRUE(pacer.WaitedInVain(Clock::now()).empty());
}

TEST(PacerTest, ArrivalsThatNobodyTookHaveWaited) {
  const Amount amount{.duration = 60};
  Pacer pacer(1, amount, 5);
  const std::vector<double> arrivals = PoissonArrivals(1, amount, 5);
  const Clock::time_point start = Clock::now() - hours(1);  // long past anybody's patience
  pacer.Start(start);
  EXPECT_FALSE(pacer.Next().has_value());
  const std::vector<double> waits = pacer.WaitedInVain(start + hours(1));
  ASSERT_EQ(waits.size(), arrivals.size());
  EXPECT_NEAR(waits.front(), 3600 - arrivals.front(), 1e-6);
  EXPECT_EQ(pacer.WaitedInVain(start + seconds(30)).size(),
            static_cast<size_t>(
                std::count_if(arrivals.begin(), arrivals.end(), [](double at) { return at < 30; })));
}

TEST(PacerTest, AClosedLoopEndsAfterItsBatchesOrItsTime) {
  Pacer counted(0, {.batches = 3}, 1);
  counted.Start(Clock::now() - hours(1));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(counted.Next().has_value());
  EXPECT_EQ(counted.Progress(Clock::now()), 1);
  EXPECT_FALSE(counted.Next().has_value());

  Pacer timed(0, {.duration = 10}, 1);
  timed.Start(Clock::now() - seconds(11));
  EXPECT_FALSE(timed.Next().has_value());
  EXPECT_TRUE(timed.WaitedInVain(Clock::now()).empty());
}

TEST(PacerTest, NothingIsDueAfterAStop) {
  Pacer closed(0, {.batches = 3}, 1);
  closed.Start(Clock::now());
  closed.Stop();
  EXPECT_FALSE(closed.Next().has_value());
  Pacer open(1e-6, {.batches = 1}, 1);  // due in days
  open.Start(Clock::now());
  open.Stop();
  EXPECT_FALSE(open.Next().has_value());
}

}  // namespace
}  // namespace lossd::perf::pacer_test
