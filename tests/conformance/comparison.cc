#include "tests/conformance/comparison.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <sstream>

#include "tests/conformance/unfused.h"

namespace lossd::engine::testing {

using kernels::testing::Problem;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::RunReference;
using kernels::testing::RunUnfused;
using kernels::testing::UnfusedResult;

int ClosenessSeeds() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int kFew = 2;  // they slow arithmetic down tenfold
#else
  constexpr int kFew = 8;
#endif
  const char* const seeds = std::getenv("LOSSD_SEEDS");
  return seeds == nullptr ? kFew : std::max(1, static_cast<int>(std::strtol(seeds, nullptr, 10)));
}

double WorstUlp(const std::vector<float>& actual, const std::vector<double>& expected) {
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(actual[i])) return std::numeric_limits<double>::infinity();
    const float magnitude = std::fabs(static_cast<float>(expected[i]));
    const double ulp = std::nextafter(magnitude, HUGE_VALF) - magnitude;
    worst = std::max(worst, std::fabs(actual[i] - expected[i]) / ulp);
  }
  return worst;
}

void Comparison::Errors::Worsen(const Errors& other) {
  loss = std::max(loss, other.loss);
  dx = std::max(dx, other.dx);
  dw = std::max(dw, other.dw);
  db = std::max(db, other.db);
}

void Comparison::Add(const Problem& problem, const std::vector<float>& losses, const std::vector<float>& dx,
                     const std::vector<float>& dw, const std::vector<float>& db) {
  const Reference reference = RunReference(problem);
  const UnfusedResult plain = RunUnfused(problem);
  const auto with_db = [&](const std::vector<float>& of) {
    return problem.bias.empty() ? 0.0 : RelativeError(of, reference.db);
  };
  fused_.Worsen({RelativeError(losses, reference.losses), RelativeError(dx, reference.dx),
                 RelativeError(dw, reference.dw), with_db(db)});
  unfused_.Worsen({RelativeError(plain.losses, reference.losses), RelativeError(plain.dx, reference.dx),
                   RelativeError(plain.dw, reference.dw), with_db(plain.db)});
  loss_ulp_ = std::max(loss_ulp_, WorstUlp(losses, reference.losses));
}

std::string Comparison::ToText() const {
  std::ostringstream text;
  text << "loss " << fused_.loss << " of " << unfused_.loss << " (" << loss_ulp_ << " ulp), dx " << fused_.dx
       << " of " << unfused_.dx << ", dw " << fused_.dw << " of " << unfused_.dw;
  if (unfused_.db > 0) text << ", db " << fused_.db << " of " << unfused_.db;
  return text.str();
}

void Comparison::ExpectCloseEnough(kernels::DataType type) const {
  if (loss_ulp_ > 4) {
    EXPECT_LE(fused_.loss, 1.0 * unfused_.loss);
  }
  if (type == kernels::DataType::kFloat32) {
    EXPECT_LE(fused_.dx, std::max(1.5 * unfused_.dx, 1e-6));
    EXPECT_LE(fused_.dw, std::max(1.5 * unfused_.dw, 1e-6));
    EXPECT_LE(fused_.db, std::max(1.5 * unfused_.db, 1e-6));
  } else {
    EXPECT_LE(fused_.dx, 1.05 * unfused_.dx);
    EXPECT_LE(fused_.dw, 0.7 * unfused_.dw);
    EXPECT_LE(fused_.db, 0.7 * unfused_.db);
  }
}

}  // namespace lossd::engine::testing
