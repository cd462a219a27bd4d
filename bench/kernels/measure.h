// What every kind of case measures with.
#ifndef LOSSD_BENCH_KERNELS_MEASURE_H_
#define LOSSD_BENCH_KERNELS_MEASURE_H_

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

namespace lossd::bench {

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// How long the host takes over it.
template <class Work>
double Milliseconds(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// Sums squares of differences and of expected values.
class ErrorNorm {
 public:
  void Add(double actual, double expected) {
    finite_ = finite_ && std::isfinite(actual);
    difference_ += (actual - expected) * (actual - expected);
    norm_ += expected * expected;
  }
  double Relative() const {
    return finite_ ? std::sqrt(difference_ / norm_) : std::numeric_limits<double>::infinity();
  }

 private:
  bool finite_ = true;
  double difference_ = 0;
  double norm_ = 0;
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_MEASURE_H_
