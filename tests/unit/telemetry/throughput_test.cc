#include "server/telemetry/status_page/throughput.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

#include "tests/support/wait.h"

namespace lossd::telemetry::throughput_test {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

TEST(WorkHistory, KnowsNoRateBeforeTheSecondSample) {
  WorkHistory history;
  EXPECT_EQ(history.Rates(5).tokens, 0);
  history.Add({.seconds = 1, .tokens = 100});
  EXPECT_EQ(history.Rates(5).tokens, 0);
  EXPECT_THAT(history.TokensPerSecond(), SizeIs(0));
}

TEST(WorkHistory, RatesAreOverTheLastSecondsAlone) {
  WorkHistory history;
  history.Add({.seconds = 0, .tokens = 0});
  history.Add({.seconds = 10, .tokens = 1000, .chunks = 1, .bytes_in = 10, .bytes_out = 20});
  history.Add({.seconds = 12, .tokens = 1300, .chunks = 5, .bytes_in = 30, .bytes_out = 80});
  history.Add({.seconds = 15, .tokens = 1500, .chunks = 11, .bytes_in = 60, .bytes_out = 120});
  const WorkRates rates = history.Rates(5);
  EXPECT_EQ(rates.tokens, 100);
  EXPECT_EQ(rates.chunks, 2);
  EXPECT_EQ(rates.bytes_in, 10);
  EXPECT_EQ(rates.bytes_out, 20);
  EXPECT_EQ(history.Rates(100).tokens, 100);
  EXPECT_THAT(history.TokensPerSecond(), ElementsAre(100, 150, 200.0 / 3));
}

TEST(WorkHistory, SamplesFurtherApartThanAskedForStillGiveARate) {
  WorkHistory history;
  history.Add({.seconds = 0, .tokens = 0});
  history.Add({.seconds = 60, .tokens = 120});
  EXPECT_EQ(history.Rates(5).tokens, 2);
}

TEST(WorkHistory, ForgetsOldSamples) {
  WorkHistory history;
  for (int i = 0; i < 1000; ++i) history.Add({.seconds = static_cast<double>(i)});
  EXPECT_THAT(history.TokensPerSecond(), SizeIs(WorkHistory::kMost - 1));
}

TEST(Throughput, SeesTheCounters) {
  engine::Counters counters;
  Throughput throughput(&counters);
  lossd::testing::Await("a sample", [&] {
    counters.tokens_valid += 1000;
    return !throughput.Read().tokens_per_second.empty();
  });
  EXPECT_GT(throughput.Read().rates.tokens, 0);
}

// A hundred that waited for their next samples would outlast anybody's patience.
TEST(Throughput, EndsAtOnce) {
  engine::Counters counters;
  int ended = 0;
  lossd::testing::Await("a hundred to end", std::async(std::launch::async, [&] {
                          for (; ended < 100; ++ended) {
                            Throughput throughput(&counters);
                            std::this_thread::sleep_for(std::chrono::milliseconds(1));
                          }
                        }));
  EXPECT_EQ(ended, 100);
}

}  // namespace
}  // namespace lossd::telemetry::throughput_test
