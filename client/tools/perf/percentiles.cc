#include "client/tools/perf/percentiles.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace lossd::perf {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

}  // namespace

double Percentile(std::span<const double> sorted, double share) {
  if (sorted.empty()) return kNone;
  const auto count = static_cast<double>(sorted.size());
  // 0.9 * 10 is a little above 9 in binary: the tolerance keeps such products at their rank.
  const double rank = std::ceil(share * count - 1e-9 * count);
  const auto index = static_cast<size_t>(std::max(rank, 1.0)) - 1;
  return sorted[std::min(index, sorted.size() - 1)];
}

Summary Summarize(std::vector<double> samples) {
  if (samples.empty()) return {.mean = kNone, .p50 = kNone, .p90 = kNone, .p99 = kNone, .max = kNone};
  std::sort(samples.begin(), samples.end());
  const double sum = std::accumulate(samples.begin(), samples.end(), 0.0);
  return {.count = static_cast<int64_t>(samples.size()),
          .mean = sum / static_cast<double>(samples.size()),
          .p50 = Percentile(samples, 0.5),
          .p90 = Percentile(samples, 0.9),
          .p99 = Percentile(samples, 0.99),
          .max = samples.back()};
}

Histogram Difference(const Histogram& before, const Histogram& after) {
  Histogram difference = after;
  difference.sum -= before.sum;
  difference.count -= before.count;
  const size_t shared = std::min(before.buckets.size(), after.buckets.size());
  for (size_t i = 0; i < shared; ++i) difference.buckets[i].cumulative -= before.buckets[i].cumulative;
  return difference;
}

double Quantile(const Histogram& histogram, double share) {
  if (histogram.buckets.empty() || histogram.buckets.back().cumulative <= 0) return kNone;
  const double rank = share * histogram.buckets.back().cumulative;
  double lower = 0;
  double below = 0;
  for (const Histogram::Bucket& bucket : histogram.buckets) {
    if (bucket.cumulative >= rank && bucket.cumulative > below) {
      if (std::isinf(bucket.bound)) return lower;
      return lower + (bucket.bound - lower) * (rank - below) / (bucket.cumulative - below);
    }
    lower = bucket.bound;
    below = bucket.cumulative;
  }
  return lower;
}

}  // namespace lossd::perf
