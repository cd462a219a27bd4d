#include "server/engine/device/sharded/rank_watch.h"

#include <gtest/gtest.h>

#include <memory>

namespace lossd::engine::rank_watch_test {
namespace {

using kernels::Exchange;
using kernels::ExchangeWait;

const HistogramReading<kDurationBounds>& Of(const RankActivity& activity, Exchange exchange) {
  return activity.waits[static_cast<size_t>(exchange)];
}

uint64_t Count(const HistogramReading<kDurationBounds>& waits) {
  uint64_t count = 0;
  for (size_t i = 0; i <= kDurationBounds.size(); ++i) count += waits.bucket(i);
  return count;
}

TEST(RankWatchTest, TellsTheOldestCommandThatIsNotDone) {
  RankWatch watch;
  EXPECT_EQ(watch.Read().command, "");
  EXPECT_EQ(watch.Read().command_seconds, 0);
  {
    const RankWatch::Executing first(&watch, "CreateHead");
    auto second = std::make_unique<RankWatch::Executing>(&watch, "ReadRows");  // by another thread, say
    EXPECT_EQ(watch.Read().command, "CreateHead");
    const double before = watch.Read().command_seconds;
    EXPECT_GE(before, 0);
    EXPECT_GE(watch.Read().command_seconds, before);
    second.reset();
    EXPECT_EQ(watch.Read().command, "CreateHead");
  }
  EXPECT_EQ(watch.Read().command, "");
}

TEST(RankWatchTest, ABatchIsUnderWayUntilItEndsWhateverIsExecutedBesideIt) {
  RankWatch watch;
  for (int batch = 0; batch < 2; ++batch) {
    const RankWatch::Executing start(&watch, "StartBatch");
    watch.BatchStarted();
  }
  EXPECT_EQ(watch.Read().command, "StartBatch");
  const RankWatch::Executing later(&watch, "ReadRows");
  EXPECT_EQ(watch.Read().command, "StartBatch") << "it is older";
  watch.BatchEnded();
  EXPECT_EQ(watch.Read().command, "StartBatch") << "the second one";
  watch.BatchEnded();
  EXPECT_EQ(watch.Read().command, "ReadRows");
}

TEST(RankWatchTest, CountsWhatWasWaitedByExchangeAndTellsWhereItWaitsNow) {
  RankWatch watch;
  EXPECT_FALSE(watch.Read().waits_at.has_value());
  {
    const ExchangeWait wait(&watch, Exchange::kInputGradients);
    EXPECT_EQ(watch.Read().waits_at, Exchange::kInputGradients);
    EXPECT_EQ(Count(Of(watch.Read(), Exchange::kInputGradients)), 0u) << "it is not over";
  }
  watch.OnWaited(Exchange::kRowStatistics, 0.5);  // as a device tells it, afterwards
  watch.OnWaited(Exchange::kRowStatistics, 0.25);
  const RankActivity activity = watch.Read();
  EXPECT_FALSE(activity.waits_at.has_value());
  EXPECT_EQ(Count(Of(activity, Exchange::kInputGradients)), 1u);
  EXPECT_EQ(Count(Of(activity, Exchange::kRowStatistics)), 2u);
  EXPECT_EQ(Of(activity, Exchange::kRowStatistics).sum(), 0.75);
  EXPECT_EQ(Count(Of(activity, Exchange::kRows)), 0u);
  EXPECT_EQ(activity.waited_seconds(), 0.75 + Of(activity, Exchange::kInputGradients).sum());
  EXPECT_GT(activity.uptime_seconds, 0);
}

}  // namespace
}  // namespace lossd::engine::rank_watch_test
