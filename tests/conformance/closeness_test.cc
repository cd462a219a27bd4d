// How close results are to fp64, compared with plain arithmetic in the same type: the criteria of
// docs/numerics.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <tuple>

#include "tests/conformance/head_under_test.h"
#include "tests/conformance/unfused.h"

namespace lossd::engine::testing {
namespace {

using kernels::testing::Narrowed;
using kernels::testing::RandomProblem;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::RunReference;
using kernels::testing::RunUnfused;
using kernels::testing::Shape;
using kernels::testing::UnfusedResult;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

constexpr int kSeeds = kSanitized ? 2 : 32;

enum class Labels {
  kRandom,
  kLikely,  // every row's hidden state points at its label's weights: p is nearly 1
};

struct Case {
  const char* name;
  Shape shape;
  double logit_deviation;
  Labels labels = Labels::kRandom;
  int seeds = kSeeds;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

// Makes row r's logit of its label about `logit`.
void PointAtLabels(Problem& problem, float logit) {
  const auto [n, v, h] = problem.shape;
  const std::vector<float> weight = problem.Weight();
  std::vector<float> x = problem.HiddenStates();
  for (int64_t r = 0; r < n; ++r) {
    const float* w = &weight[problem.labels[r] * h];
    float norm = 0;
    for (int64_t i = 0; i < h; ++i) norm += w[i] * w[i];
    for (int64_t i = 0; i < h; ++i) x[r * h + i] = 0.1f * x[r * h + i] + logit / norm * w[i];
  }
  problem.hidden_states = Narrowed(problem.hidden_type, x);
}

struct Errors {
  double loss = 0;
  double dx = 0;
  double dw = 0;

  void Worsen(const Errors& other) {
    loss = std::max(loss, other.loss);
    dx = std::max(dx, other.dx);
    dw = std::max(dw, other.dw);
  }
};

// Largest difference in units in the last place of the expected value.
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

class Closeness : public ::testing::TestWithParam<std::tuple<DeviceUnderTest, Case, DataType>>,
                  protected OnDevice {
 protected:
  void SetUp() override { CreateDeviceFor(std::get<0>(GetParam()), std::get<2>(GetParam())); }
};

TEST_P(Closeness, IsThatOfPlainArithmeticOrBetter) {
  const Case& c = std::get<1>(GetParam());
  const DataType type = std::get<2>(GetParam());
  Errors fused;
  Errors unfused;
  double loss_ulp = 0;
  for (int seed = 1; seed <= c.seeds; ++seed) {
    Problem problem = RandomProblem({.shape = c.shape,
                                     .type = type,
                                     .logit_deviation = c.logit_deviation,
                                     .seed = static_cast<uint64_t>(seed)});
    if (c.labels == Labels::kLikely) PointAtLabels(problem, 20.0f);
    const Reference reference = RunReference(problem);
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput output = head.Run(problem);
    const UnfusedResult plain = RunUnfused(problem);
    fused.Worsen({RelativeError(output.losses, reference.losses), RelativeError(output.dx, reference.dx),
                  RelativeError(head.Gradient(), reference.dw)});
    unfused.Worsen({RelativeError(plain.losses, reference.losses), RelativeError(plain.dx, reference.dx),
                    RelativeError(plain.dw, reference.dw)});
    loss_ulp = std::max(loss_ulp, WorstUlp(output.losses, reference.losses));
  }
  std::cout << c.name << " " << Name(type) << ": loss " << fused.loss << " of " << unfused.loss << " ("
            << loss_ulp << " ulp), dx " << fused.dx << " of " << unfused.dx << ", dw " << fused.dw << " of "
            << unfused.dw << "\n";
  if (loss_ulp > 4) {
    EXPECT_LE(fused.loss, 1.0 * unfused.loss);
  }
  if (type == DataType::kFloat32) {
    EXPECT_LE(fused.dx, std::max(1.5 * unfused.dx, 1e-6));
    EXPECT_LE(fused.dw, std::max(1.5 * unfused.dw, 1e-6));
  } else {
    EXPECT_LE(fused.dx, 1.05 * unfused.dx);
    EXPECT_LE(fused.dw, 0.7 * unfused.dw);
  }
}

const Case kCases[] = {
    {"NearlyUniform", {64, 512, 128}, 0.1},
    {"Moderate", {64, 512, 128}, 1.0},
    {"Peaked", {64, 512, 128}, 3.0},
    {"VeryPeaked", {64, 512, 128}, 10.0},
    {"RaggedInEveryDirection", {37, 777, 123}, 1.0},
    {"SingleRow", {1, 1000, 123}, 2.0},
    {"ManyRowsOfFewEntries", {425, 33, 123}, 2.0},
    {"TargetsNearCertainty", {64, 512, 128}, 1.0, Labels::kLikely},
    {"LogitsInTheThousands", {32, 512, 128}, 2500.0},
    {"LargeVocabulary", {kSanitized ? 3 : 64, 50257, 123}, 0.3, Labels::kRandom, 1},
    {"LargeVocabularyPeaked", {kSanitized ? 2 : 16, 50257, 123}, 3.0, Labels::kRandom, 1},
    {"LargeVocabularySingleRow", {1, 50257, 123}, 1.0, Labels::kRandom, kSanitized ? 1 : 4},
    {"ManyRowsOfALargeVocabulary", {kSanitized ? 5 : 425, 50257, 123}, 1.0, Labels::kRandom, 1},
};

INSTANTIATE_TEST_SUITE_P(All, Closeness,
                         ::testing::Combine(::testing::ValuesIn(DevicesUnderTest()),
                                            ::testing::ValuesIn(kCases), ::testing::ValuesIn(kTypes)),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + "_" + std::get<1>(test.param).name + "_" +
                                  Name(std::get<2>(test.param));
                         });

TEST(Comparison, NaNNeverPasses) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(RelativeError({1.0f, nan}, {1.0, 2.0}) <= 1e300);
  EXPECT_FALSE(RelativeError({1.0f, 2.0f}, {1.0, nan}) <= 1e300);
  EXPECT_FALSE(WorstUlp({nan}, {1.0}) <= 4);
  EXPECT_GT(RelativeError({1.0f, 2.1f}, {1.0, 2.0}), 0.01);
}

}  // namespace
}  // namespace lossd::engine::testing
