// Percentiles of samples and of Prometheus histograms.
#ifndef LOSSD_CLIENT_TOOLS_PERF_PERCENTILES_H_
#define LOSSD_CLIENT_TOOLS_PERF_PERCENTILES_H_

#include <cstdint>
#include <span>
#include <vector>

namespace lossd::perf {

// The smallest sample that at least the given share of all samples does not exceed (nearest rank). `sorted`
// ascends; 0 < share <= 1. NaN of no samples.
double Percentile(std::span<const double> sorted, double share);

struct Summary {
  int64_t count = 0;
  // NaN without samples.
  double mean = 0;
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double max = 0;
};
Summary Summarize(std::vector<double> samples);

// A histogram as Prometheus has it: of each bucket its upper bound and how many samples were at most that;
// bounds ascend, the last is infinite.
struct Histogram {
  struct Bucket {
    double bound = 0;
    double cumulative = 0;
  };
  std::vector<Bucket> buckets = {};
  double sum = 0;
  double count = 0;
};

// What was added between two readings of one histogram.
Histogram Difference(const Histogram& before, const Histogram& after);

// As Prometheus's histogram_quantile: linear within the bucket, so no more exact than the buckets are wide;
// the last finite bound if the sample lies above it. NaN of an empty histogram.
double Quantile(const Histogram& histogram, double share);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_PERCENTILES_H_
