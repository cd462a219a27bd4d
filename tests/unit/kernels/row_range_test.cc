// Rows whose logits or gradients leave the range of a number.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/linear_cross_entropy.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::row_range_test {
namespace {

using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::RunReference;
using testing::RunStep;
using testing::SameBits;
using testing::SetLogit;
using testing::StepResult;

constexpr int64_t kIgnored = -100;

TEST(CpuLinearCrossEntropy, RowsFarAboveTheirFirstBlockAreRedoneExactly) {
  for (const float value : {120.0f, 1e4f, 3e7f, 1e30f}) {
    SCOPED_TRACE(value);
    Problem problem = RandomProblem({.shape = {60, 900, 40}});
    const StepResult before = RunStep(problem);
    SetLogit(problem, 3, 800, value);
    SetLogit(problem, 4, 800, value);
    problem.labels[4] = 800;
    const Reference reference = RunReference(problem);
    const StepResult result = RunStep(problem);
    EXPECT_TRUE(result.intact);
    EXPECT_EQ(result.stats.rows_redone, 2);
    EXPECT_LT(RelativeError(result.losses, reference.losses), 1e-5);
    EXPECT_LT(RelativeError(result.log_sum_exp, reference.log_sum_exp), 1e-5);
    EXPECT_LT(RelativeError(result.dx, reference.dx), 1e-5);
    EXPECT_LT(RelativeError(result.dw, reference.dw), 1e-5);
    EXPECT_EQ(result.losses[4], 0.0f);
  }
}

TEST(CpuLinearCrossEntropy, ARedoneRowLeavesItsNeighboursBitsAlone) {
  Problem problem = RandomProblem({.shape = {60, 900, 40}});
  SetLogit(problem, 3, 800, 150.0f);
  const StepResult with = RunStep(problem);
  EXPECT_EQ(with.stats.rows_redone, 1);
  Problem without = problem;
  without.labels[3] = kIgnored;
  const StepResult expected = RunStep(without);
  EXPECT_EQ(expected.stats.rows_redone, 0);
  for (int64_t r = 0; r < 60; ++r) {
    if (r == 3) continue;
    EXPECT_EQ(with.losses[r], expected.losses[r]) << r;
    EXPECT_TRUE(SameBits(&with.dx[r * 40], &expected.dx[r * 40], 40)) << r;
  }
}

TEST(CpuLinearCrossEntropy, RowsFarBelowZeroNeedNoRedo) {
  // All logits of a row near -5000 or +5000: the offset follows the row.
  Problem problem = RandomProblem({.shape = {20, 900, 40}});
  std::vector<float> weight = problem.Weight();
  std::vector<float> x = problem.HiddenStates();
  for (int64_t v = 0; v < 900; ++v) weight[v * 40] = 1.0f;
  for (int64_t r = 0; r < 20; ++r) x[r * 40] = r % 2 == 0 ? -5000.0f : 5000.0f;
  problem.weight = testing::Narrowed(DataType::kFloat32, weight);
  problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
  const Reference reference = RunReference(problem);
  const StepResult result = RunStep(problem);
  EXPECT_EQ(result.stats.rows_redone, 0);
  EXPECT_LT(RelativeError(result.losses, reference.losses), 1e-3);  // fp32 logits of 5000 are that coarse
  EXPECT_LT(RelativeError(result.dw, reference.dw), 1e-3);
}

TEST(CpuLinearCrossEntropy, EqualLogitsCostExactlyTheLogarithmOfTheVocabulary) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const int64_t vocab : {1, 2, 777, 50257}) {
      for (const float logit : {0.0f, 1.0f, -1.0f, 0x1p24f, -0x1p24f}) {
        Problem problem = RandomProblem({.shape = {3, vocab, 4}, .type = type});
        problem.weight = testing::Narrowed(type, std::vector<float>(static_cast<size_t>(vocab * 4), 256.0f));
        problem.hidden_states = testing::Narrowed(type, std::vector<float>(12, logit / 1024));
        for (const float loss : RunStep(problem).losses) {
          EXPECT_EQ(loss, static_cast<float>(std::log(static_cast<double>(vocab)))) << vocab << " " << logit;
        }
      }
    }
  }
}

TEST(CpuLinearCrossEntropy, AnOverflowingRowIsNaNAloneAndNeverReachesDw) {
  Problem problem = RandomProblem({.shape = {60, 900, 40}});
  Problem expected_problem = problem;
  std::vector<float> x = problem.HiddenStates();
  for (int64_t h = 0; h < 40; ++h) x[7 * 40 + h] = 3e38f;
  problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
  expected_problem.labels[7] = kIgnored;
  const StepResult result = RunStep(problem);
  const StepResult expected = RunStep(expected_problem);
  EXPECT_EQ(result.status, Status::kOk);
  EXPECT_TRUE(std::isnan(result.losses[7]));
  EXPECT_TRUE(std::isnan(result.log_sum_exp[7]));
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, &result.dx[7 * 40], 40), 40);
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.dw.data(), 900 * 40), 0);
  EXPECT_LT(RelativeError(result.dw, {expected.dw.begin(), expected.dw.end()}), 1e-6);
  for (int64_t r = 0; r < 60; ++r) {
    if (r == 7) continue;
    EXPECT_TRUE(SameBits(&result.dx[r * 40], &expected.dx[r * 40], 40)) << r;
  }
}

TEST(CpuLinearCrossEntropy, ARowThatIsFiniteButNotInTheWeightsTypeNeverReachesDw) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    SCOPED_TRACE(Name(type));
    Problem problem = RandomProblem({.shape = {30, 300, 40}, .type = type});
    std::vector<float> x = problem.HiddenStates();
    x[7 * 40 + 3] = type == DataType::kBFloat16 ? 3.4e38f : 65520.0f;  // the least that rounds to infinity
    problem.hidden_type = DataType::kFloat32;
    problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
    const StepResult result = RunStep(problem);
    EXPECT_TRUE(std::isnan(result.losses[7]));
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.dw.data(), 300 * 40), 0);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.dx.data(), 30 * 40), 40);
  }
}

// A weight that overflowed when it was rounded to fp16 takes its rows' logits with it, as in plain
// arithmetic.
TEST(CpuLinearCrossEntropy, AnInfiniteWeightOfAnyTypeIsSeen) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    Problem problem = RandomProblem({.shape = {3, 300, 40}, .type = type});
    std::vector<float> weight = problem.Weight();
    weight[250 * 40 + 7] = std::numeric_limits<float>::infinity();
    std::vector<float> x = problem.HiddenStates();
    for (int64_t r = 0; r < 3; ++r) x[r * 40 + 7] = 1.0f;
    problem.weight = testing::Narrowed(type, weight);
    problem.hidden_states = testing::Narrowed(type, x);
    const StepResult result = RunStep(problem);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.losses.data(), 3), 3) << Name(type);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.dw.data(), 300 * 40), 0) << Name(type);
  }
}

// fp16 reaches 65504, its gradients in fp32 far more: scales that no fp16 product could hold lose nothing.
TEST(CpuLinearCrossEntropy, Fp16HeadsHaveFp32sRangeInside) {
  for (const float scale : {1e-12f, 1e12f}) {
    Problem problem =
        RandomProblem({.shape = {60, 900, 40}, .type = DataType::kFloat16, .logit_deviation = 3.0});
    problem.gradient_scale = scale;
    const Reference reference = RunReference(problem);
    const StepResult result = RunStep(problem);
    EXPECT_LT(RelativeError(result.dx, reference.dx), 1e-5) << scale;
    EXPECT_LT(RelativeError(result.dw, reference.dw), 1e-5) << scale;
  }
}

TEST(CpuLinearCrossEntropy, DxBeyondTheRangeOfTheTypeAskedForIsInfiniteAndDwIsNot) {
  Problem problem =
      RandomProblem({.shape = {9, 300, 40}, .type = DataType::kFloat16, .logit_deviation = 3.0});
  problem.gradient_scale = 1e6f;
  const StepResult exact = RunStep(problem);
  const StepResult result = RunStep(problem, {.dx_type = DataType::kFloat16});
  int64_t beyond = 0;
  for (size_t i = 0; i < exact.dx.size(); ++i) {
    if (std::fabs(exact.dx[i]) < 65520.0f) continue;
    ++beyond;
    EXPECT_EQ(result.dx[i], std::copysign(std::numeric_limits<float>::infinity(), exact.dx[i])) << i;
  }
  EXPECT_GT(beyond, 0);
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.dx.data(), 9 * 40), beyond);
  EXPECT_TRUE(SameBits(result.dw, exact.dw));
}

TEST(CpuLinearCrossEntropy, ARowWhoseGradientWouldOverflowNeverReachesDw) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    Problem problem = RandomProblem({.shape = {60, 900, 40}, .type = type});
    std::vector<float> x = problem.HiddenStates();
    std::vector<float> weight = problem.Weight();
    for (int64_t v = 0; v < 900; ++v) weight[v * 40 + 3] = 0.0f;  // keeps the logits of row 7 finite
    x[7 * 40 + 3] = 2e38f;
    problem.weight = testing::Narrowed(type, weight);
    problem.hidden_states = testing::Narrowed(type, x);
    const StepResult result = RunStep(problem);
    EXPECT_TRUE(std::isnan(result.losses[7]));
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.losses.data(), 60), 1);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.dw.data(), 900 * 40), 0);
  }
}

TEST(CpuLinearCrossEntropy, AHugeGradientScaleNeverMakesDwNaN) {
  Problem problem = RandomProblem({.shape = {60, 900, 40}});
  problem.gradient_scale = 3e38f;
  const StepResult result = RunStep(problem);
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.dw.data(), 900 * 40), 0);
}

}  // namespace
}  // namespace lossd::kernels::row_range_test
