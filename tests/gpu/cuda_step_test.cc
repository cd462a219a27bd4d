// The CUDA step against the CPU and against itself. Names that begin with Small have shapes that
// compute-sanitizer gets through.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/gpu/cuda_step_fixture.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::cuda_step_test {
namespace {

using cuda::Path;
using testing::CudaOptions;
using testing::CudaOutcome;
using testing::CudaStepTest;
using testing::Describe;
using testing::kIgnoreIndex;
using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::SameBits;
using testing::SetLogit;
using testing::Shape;

class CudaStep : public CudaStepTest {};

TEST_P(CudaStep, SmallShapesAgreeWithTheCpu) {
  for (const Shape& shape :
       {Shape{1, 1, 1}, Shape{1, 2, 1}, Shape{2, 3, 5}, Shape{7, 257, 33}, Shape{16, 256, 64},
        Shape{31, 1000, 123}, Shape{65, 511, 17}, Shape{129, 300, 40}}) {
    SCOPED_TRACE(Describe(shape));
    const Problem problem = RandomProblem({.shape = shape, .type = type(), .logit_deviation = 2.0});
    const CudaOutcome outcome = Run(problem, Options());
    ExpectClose(outcome, Expected(problem));
    EXPECT_EQ(outcome.rows_redone, 0);
  }
}

TEST_P(CudaStep, LargerShapesAgreeWithTheCpu) {
  for (const Shape& shape : {Shape{300, 96, 300}, Shape{425, 777, 123}, Shape{1, 5000, 256},
                             Shape{513, 2000, 520}, Shape{1030, 4099, 264}, Shape{9, 50257, 123}}) {
    SCOPED_TRACE(Describe(shape));
    const Problem problem = RandomProblem({.shape = shape, .type = type(), .logit_deviation = 2.0});
    ExpectClose(Run(problem, Options()), Expected(problem));
  }
}

TEST_P(CudaStep, SmallTilesAndAccumulationAddUp) {
  const Problem problem = RandomProblem({.shape = {100, 500, 72}, .type = type(), .logit_deviation = 2.0});
  Reference reference = Expected(problem);
  CudaOptions options = Options();
  options.tile_rows = 33;
  ExpectClose(Run(problem, options), reference);
  options.weight_gradient = WeightGradient::kAccumulate;
  options.initial_dw.assign(500 * 72, 0.25f);
  for (double& value : reference.dw) value += 0.25;
  ExpectClose(Run(problem, options), reference);
}

TEST_P(CudaStep, SmallBatchWithoutGradientsGivesTheSameLosses) {
  const Problem problem = RandomProblem({.shape = {70, 500, 72}, .type = type()});
  const CudaOutcome whole = Run(problem, Options());
  CudaOptions options = Options();
  options.dx_wanted = false;
  options.weight_gradient = WeightGradient::kNone;
  options.initial_dw.assign(500 * 72, 7.0f);
  const CudaOutcome forward = Run(problem, options);
  EXPECT_TRUE(SameBits(forward.losses, whole.losses));
  EXPECT_TRUE(SameBits(forward.log_sum_exps, whole.log_sum_exps));
  EXPECT_TRUE(SameBits(forward.dw, options.initial_dw));
}

TEST_P(CudaStep, SmallIgnoredRowsAndRowsWithoutAShareAddNothingToDw) {
  Problem problem = RandomProblem({.shape = {90, 400, 64}, .type = type()});
  Problem expected_problem = problem;
  CudaOptions options = Options();
  options.shares.assign(90, 1.0f);
  for (size_t i = 0; i < 90; i += 3) {
    problem.labels[i] = kIgnoreIndex;
    expected_problem.labels[i] = kIgnoreIndex;
  }
  for (size_t i = 1; i < 90; i += 3) {
    options.shares[i] = 0;
    expected_problem.labels[i] = kIgnoreIndex;
  }
  const CudaOutcome outcome = Run(problem, options);
  const CudaOutcome expected = Run(expected_problem, Options());
  EXPECT_LT(RelativeError(outcome.dw, {expected.dw.begin(), expected.dw.end()}), 1e-6);
  for (size_t i = 0; i < 90; ++i) {
    const bool zero =
        std::all_of(&outcome.dx[i * 64], &outcome.dx[i * 64] + 64, [](float x) { return x == 0; });
    EXPECT_EQ(zero, i % 3 == 0) << i;
    EXPECT_EQ(outcome.losses[i] == 0, i % 3 == 0) << i;
  }
}

TEST_P(CudaStep, RowsDoNotDependOnTheRowsBesideThem) {
  constexpr int64_t kHidden = 520;
  constexpr int64_t kTokens = 1300;
  const Problem whole =
      RandomProblem({.shape = {kTokens, 3000, kHidden}, .type = type(), .logit_deviation = 3.0});
  CudaOptions options = Options();
  options.tile_rows = 1300;
  const CudaOutcome expected = Run(whole, options);
  const std::vector<std::pair<int64_t, int64_t>> parts = {{0, 1},    {1299, 1}, {500, 1},  {3, 2},
                                                          {7, 64},   {100, 65}, {33, 128}, {800, 129},
                                                          {11, 300}, {5, 520},  {1, 1299}};
  for (const auto& range : parts) {
    const int64_t first = range.first;
    const int64_t count = range.second;
    SCOPED_TRACE("rows " + std::to_string(first) + " + " + std::to_string(count));
    const CudaOutcome outcome = Run(testing::PartOf(whole, first, count), options);
    const auto slice = [&](const std::vector<float>& values, int64_t width) {
      return std::vector<float>(values.begin() + first * width, values.begin() + (first + count) * width);
    };
    EXPECT_TRUE(SameBits(outcome.losses, slice(expected.losses, 1)));
    EXPECT_TRUE(SameBits(outcome.log_sum_exps, slice(expected.log_sum_exps, 1)));
    EXPECT_TRUE(SameBits(outcome.dx, slice(expected.dx, kHidden)));
  }
}

TEST_P(CudaStep, TheSameCallsGiveTheSameBits) {
  const Problem problem = RandomProblem({.shape = {700, 3000, 264}, .type = type(), .logit_deviation = 3.0});
  const CudaOutcome first = Run(problem, Options());
  for (int i = 0; i < 5; ++i) {
    const CudaOutcome again = Run(problem, Options());
    EXPECT_TRUE(SameBits(again.losses, first.losses));
    EXPECT_TRUE(SameBits(again.dx, first.dx));
    EXPECT_TRUE(SameBits(again.dw, first.dw));
  }
}

TEST_P(CudaStep, SmallRowsFarAboveTheSampleAreRedoneExactlyAndLeaveTheOthersAlone) {
  for (const float value : {150.0f, 20000.0f, 3e7f, 1e30f}) {
    if (type() == DataType::kFloat16 && value > 6e4f) continue;
    SCOPED_TRACE(value);
    Problem problem = RandomProblem({.shape = {60, 900, 80}, .type = type()});
    const CudaOutcome before = Run(problem, Options());
    for (int64_t row = 10; row < 14; ++row) SetLogit(problem, row, 333, value);
    const Reference reference = Expected(problem);
    const CudaOutcome outcome = Run(problem, Options());
    EXPECT_LT(RelativeError(outcome.losses, reference.losses), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.dw, reference.dw), Tolerance());
    if (GetParam().path == Path::kHopper && type() == DataType::kBFloat16) {
      EXPECT_GT(outcome.rows_redone, 0);
    }
    EXPECT_EQ(before.rows_redone, 0);
  }
}

TEST_P(CudaStep, SmallRowsThatOverflowAreNaNAloneAndNeverReachDw) {
  Problem problem = RandomProblem({.shape = {60, 900, 40}, .type = type()});
  Problem expected_problem = problem;
  std::vector<float> x = problem.HiddenStates();
  for (size_t h = 0; h < 40; ++h) x[7 * 40 + h] = 3.4e38f;  // infinite in 16 bits
  problem.hidden_type = DataType::kFloat32;
  problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
  expected_problem.labels[7] = kIgnoreIndex;
  const CudaOutcome outcome = Run(problem, Options());
  const CudaOutcome expected = Run(expected_problem, Options());
  EXPECT_TRUE(std::isnan(outcome.losses[7]));
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.losses.data(), 60), 1);
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, &outcome.dx[7 * 40], 40), 40);
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.dx.data(), 60 * 40), 40);
  EXPECT_LT(RelativeError(outcome.dw, {expected.dw.begin(), expected.dw.end()}), 1e-6);
}

TEST_P(CudaStep, SmallBatchWithAHugeGradientScaleNeverMakesDwNaN) {
  Problem problem = RandomProblem({.shape = {60, 900, 40}, .type = type()});
  problem.gradient_scale = 3e38f;
  const CudaOutcome outcome = Run(problem, Options());
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.dw.data(), 900 * 40), 0);
}

TEST_P(CudaStep, ResultsDoNotDependOnTheChoiceOfExponents) {
  const Problem problem = RandomProblem({.shape = {300, 3000, 264}, .type = type(), .logit_deviation = 3.0});
  const CudaOutcome expected = Run(problem, Options());
  for (const int32_t bias : {-40, -8, 2, 16}) {
    SCOPED_TRACE(bias);
    CudaOptions options = Options();
    options.exponent_bias = bias;
    const CudaOutcome outcome = Run(problem, options);
    EXPECT_TRUE(SameBits(outcome.losses, expected.losses));
    EXPECT_TRUE(SameBits(outcome.dx, expected.dx));
    EXPECT_TRUE(SameBits(outcome.dw, expected.dw));
    EXPECT_EQ(outcome.rows_redone, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaStep, testing::EveryVariant(), testing::VariantName);

}  // namespace
}  // namespace lossd::kernels::cuda_step_test
