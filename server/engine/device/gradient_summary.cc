#include "server/engine/device/gradient_summary.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/data_type.h"

namespace lossd::engine {

void GradientSummary::Add(std::span<const float> piece) {
  non_finite_ +=
      kernels::CountNonFinite(kernels::DataType::kFloat32, piece.data(), static_cast<int64_t>(piece.size()));
  // Several partial sums, so that the additions need not wait for each other.
  std::array<double, 8> sums{};
  size_t i = 0;
  for (; i + sums.size() <= piece.size(); i += sums.size()) {
    for (size_t k = 0; k < sums.size(); ++k) {
      const double value = piece[i + k];
      sums[k] += value * value;
    }
  }
  for (; i < piece.size(); ++i) sums[0] += static_cast<double>(piece[i]) * piece[i];
  for (const double sum : sums) squares_ += sum;
  for (const float value : piece) {
    if (std::isfinite(value)) largest_ = std::max(largest_, std::abs(value));
  }
}

double GradientSummary::norm() const { return std::sqrt(squares_); }

}  // namespace lossd::engine
