// How close the step is to fp64, compared with plain arithmetic in the same type: the criteria of
// docs/numerics.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <tuple>

#include "kernels/cpu/arithmetic.h"
#include "tests/conformance/unfused.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels {
namespace {

using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::RunReference;
using testing::RunStep;
using testing::RunUnfused;
using testing::Shape;
using testing::StepResult;
using testing::UnfusedResult;

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
  problem.hidden_states = testing::Narrowed(problem.hidden_type, x);
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

class Closeness : public ::testing::TestWithParam<std::tuple<Case, DataType>> {};

TEST_P(Closeness, IsThatOfPlainArithmeticOrBetter) {
  const auto& [c, type] = GetParam();
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
    const StepResult result = RunStep(problem);
    ASSERT_EQ(result.status, Status::kOk);
    const UnfusedResult plain = RunUnfused(problem);
    fused.Worsen({RelativeError(result.losses, reference.losses), RelativeError(result.dx, reference.dx),
                  RelativeError(result.dw, reference.dw)});
    unfused.Worsen({RelativeError(plain.losses, reference.losses), RelativeError(plain.dx, reference.dx),
                    RelativeError(plain.dw, reference.dw)});
    loss_ulp = std::max(loss_ulp, WorstUlp(result.losses, reference.losses));
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
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(DataType::kFloat32, DataType::kBFloat16,
                                                              DataType::kFloat16)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param).name) + "_" +
                                  Name(std::get<1>(test.param));
                         });

TEST(EqualLogits, CostExactlyTheLogarithmOfTheVocabulary) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    // bf16 arithmetic rounds v x to bf16.
    const bool coarse = cpu::BestArithmetic(type) == cpu::Arithmetic::kLibraryBFloat16;
    const double tolerance = coarse ? 4e-3 : 1e-6;
    for (const int64_t vocab : {1, 2, 777, 50257}) {
      for (const float logit : {0.0f, 1.0f, -1.0f, 0x1p24f, -0x1p24f}) {
        Problem problem = RandomProblem({.shape = {3, vocab, 4}, .type = type});
        problem.weight = testing::Narrowed(type, std::vector<float>(static_cast<size_t>(vocab * 4), 256.0f));
        problem.hidden_states = testing::Narrowed(type, std::vector<float>(12, logit / 1024));
        const StepResult result = RunStep(problem);
        for (const float loss : result.losses) {
          EXPECT_EQ(loss, static_cast<float>(std::log(static_cast<double>(vocab)))) << vocab << " " << logit;
        }
        EXPECT_LT(RelativeError(result.dw, RunReference(problem).dw), tolerance) << vocab << " " << logit;
      }
    }
  }
}

TEST(IgnoredBatch, LeavesNothingBehind) {
  Problem problem = RandomProblem({.shape = {425, 777, 123}});
  problem.labels.assign(425, -100);
  const StepResult result = RunStep(problem);
  for (const float value : result.losses) ASSERT_EQ(value, 0.0f);
  for (const float value : result.dx) ASSERT_EQ(value, 0.0f);
  for (const float value : result.dw) ASSERT_EQ(value, 0.0f);
}

TEST(Comparison, NaNNeverPasses) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(RelativeError({1.0f, nan}, {1.0, 2.0}) <= 1e300);
  EXPECT_FALSE(RelativeError({1.0f, 2.0f}, {1.0, nan}) <= 1e300);
  EXPECT_FALSE(WorstUlp({nan}, {1.0}) <= 4);
  EXPECT_GT(RelativeError({1.0f, 2.1f}, {1.0, 2.0}), 0.01);
}

}  // namespace
}  // namespace lossd::kernels
