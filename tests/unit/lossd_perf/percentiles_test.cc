// Percentiles of samples and of the server's histograms.
#include "client/tools/perf/percentiles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "client/tools/perf/metrics.h"

namespace lossd::perf::percentiles_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(PercentileTest, IsTheSampleOfTheNearestRank) {
  const std::vector<double> ten = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  EXPECT_EQ(Percentile(ten, 0.5), 5);
  EXPECT_EQ(Percentile(ten, 0.9), 9);
  EXPECT_EQ(Percentile(ten, 0.91), 10);
  EXPECT_EQ(Percentile(ten, 0.99), 10);
  EXPECT_EQ(Percentile(ten, 1), 10);
  EXPECT_EQ(Percentile(ten, 0.001), 1);
  EXPECT_EQ(Percentile(std::vector<double>{7}, 0.5), 7);
  EXPECT_TRUE(std::isnan(Percentile({}, 0.5)));
}

TEST(PercentileTest, ShareTimesCountThatIsInexactInBinaryKeepsItsRank) {
  std::vector<double> samples(1000);
  std::iota(samples.begin(), samples.end(), 1);
  for (int percent = 1; percent <= 100; ++percent) {
    EXPECT_EQ(Percentile(samples, percent / 100.0), percent * 10);
  }
}

TEST(SummarizeTest, SortsFirst) {
  const Summary summary = Summarize({3, 1, 2, 4});
  EXPECT_EQ(summary.count, 4);
  EXPECT_EQ(summary.mean, 2.5);
  EXPECT_EQ(summary.p50, 2);
  EXPECT_EQ(summary.p99, 4);
  EXPECT_EQ(summary.max, 4);
  EXPECT_EQ(Summarize({}).count, 0);
  EXPECT_TRUE(std::isnan(Summarize({}).p50));
}

TEST(QuantileTest, IsLinearWithinABucket) {
  const Histogram histogram{.buckets = {{1, 0}, {2, 4}, {4, 8}, {kInfinity, 10}}, .count = 10};
  EXPECT_DOUBLE_EQ(Quantile(histogram, 0.2), 1.5);
  EXPECT_DOUBLE_EQ(Quantile(histogram, 0.4), 2);
  EXPECT_DOUBLE_EQ(Quantile(histogram, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(Quantile(histogram, 0.99), 4);  // above every finite bound
  EXPECT_TRUE(std::isnan(Quantile({}, 0.5)));
}

TEST(MetricsTest, HistogramsAreReadByLabelAndSubtracted) {
  const auto text = [](int queue_fast, int queue_all) {
    return "# HELP a comment\nt_count{stage=\"queue\"} " + std::to_string(queue_all) +
           "\nt_sum{stage=\"queue\"} " + std::to_string(queue_all * 2) +
           "\nt_bucket{stage=\"queue\",le=\"+Inf\"} " + std::to_string(queue_all) +
           "\nt_bucket{stage=\"queue\",le=\"0.5\"} " + std::to_string(queue_fast) +
           "\nt_bucket{stage=\"other\",le=\"0.5\"} 100\nlossd_heads 3\n";
  };
  const Metrics before = ParseMetrics(text(1, 2));
  const Metrics after = ParseMetrics(text(5, 7));
  EXPECT_EQ(before.at("lossd_heads"), 3);
  const auto read = [](const Metrics& metrics) { return HistogramOf(metrics, "t", "stage=\"queue\""); };
  const Histogram added = Difference(read(before), read(after));
  EXPECT_EQ(added.count, 5);
  EXPECT_EQ(added.sum, 10);
  ASSERT_EQ(added.buckets.size(), 2u);
  EXPECT_EQ(added.buckets[0].bound, 0.5);
  EXPECT_EQ(added.buckets[0].cumulative, 4);
  EXPECT_EQ(added.buckets[1].bound, kInfinity);
  EXPECT_EQ(added.buckets[1].cumulative, 5);
  EXPECT_TRUE(HistogramOf(after, "t", "stage=\"none\"").buckets.empty());
}

}  // namespace
}  // namespace lossd::perf::percentiles_test
