// Sums of the statistics of a gradient, added up piece by piece.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_GRADIENT_SUMMARY_H_
#define LOSSD_SERVER_ENGINE_DEVICE_GRADIENT_SUMMARY_H_

#include <cstdint>
#include <span>

namespace lossd::engine {

class GradientSummary {
 public:
  void Add(std::span<const float> piece);

  double norm() const;  // Frobenius; NaN or infinite if an element is
  float largest() const { return largest_; }
  int64_t non_finite() const { return non_finite_; }

 private:
  double squares_ = 0;
  float largest_ = 0;
  int64_t non_finite_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_GRADIENT_SUMMARY_H_
