// Losses, dX and dW against those of the oracle, for every combination of types and every pattern of labels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing::values_test {
namespace {

using kernels::testing::Describe;
using kernels::testing::Narrowed;
using kernels::testing::RandomProblem;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;
using kernels::testing::Shape;

constexpr double kLossError = 1e-5;

// What rounding dX once to a type adds.
double RoundingError(DataType type) {
  return type == DataType::kFloat32 ? 0 : type == DataType::kBFloat16 ? 4e-3 : 1e-3;
}

class Values : public HeadTest {};

INSTANTIATE_TEST_SUITE_P(All, Values, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Values, AgreeWithTheReferenceInEveryShape) {
  for (const Shape& shape :
       {Shape{1, 1, 1}, Shape{1, 2, 1}, Shape{2, 3, 5}, Shape{7, 257, 33}, Shape{16, 256, 64},
        Shape{31, 1000, 123}, Shape{65, 511, 17}, Shape{129, 300, 40}, Shape{300, 96, 300},
        Shape{425, 777, 123}, Shape{1, 5000, 256}, Shape{1, 50257, 123}, Shape{5, 50257, 123}}) {
    if (!Takes(shape.vocab)) continue;
    SCOPED_TRACE(Describe(shape));
    const Problem problem = RandomProblem({.shape = shape, .type = type(), .logit_deviation = 2.0});
    const Reference reference = Expected(problem);
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput output = head.Run(problem);
    EXPECT_LT(RelativeError(output.losses, reference.losses), RowTolerance(kLossError));
    EXPECT_LT(RelativeError(output.dx, reference.dx), GradientTolerance());
    EXPECT_LT(RelativeError(head.Gradient(), reference.dw), GradientTolerance());
  }
}

TEST_P(Values, AgreeForHiddenStatesAndDxOfEveryType) {
  Problem problem = RandomProblem({.shape = {40, 300, 64}, .type = type(), .logit_deviation = 2.0});
  problem.gradient_scale = 1.0f;  // keeps dX away from fp16's subnormal numbers
  const std::vector<float> exact = RandomProblem({.shape = {40, 300, 64}, .seed = 9}).HiddenStates();
  HeadUnderTest head(device_.get(), problem);
  for (const DataType hidden_type : kTypes) {
    problem.hidden_type = hidden_type;
    problem.hidden_states = Narrowed(hidden_type, exact);
    Problem rounded = problem;  // to the head's type, which is what products see
    rounded.hidden_type = type();
    rounded.hidden_states = Narrowed(type(), problem.HiddenStates());
    const Reference reference = Expected(rounded);
    for (const DataType dx_type : kTypes) {
      SCOPED_TRACE(std::string(Name(hidden_type)) + " in, dX in " + Name(dx_type));
      head.backend().ResetGradient();
      const ChunkOutput output = head.Run(KindOf(problem, dx_type), {RowsOf(problem, 0, 40)}).front();
      EXPECT_LT(RelativeError(output.losses, reference.losses), RowTolerance(kLossError));
      EXPECT_LT(RelativeError(output.dx, reference.dx), GradientTolerance() + RoundingError(dx_type));
      EXPECT_LT(RelativeError(head.Gradient(), reference.dw), GradientTolerance());
    }
  }
}

TEST_P(Values, DxIsRoundedOnceToTheTypeAskedFor) {
  const Problem problem = RandomProblem({.shape = {70, 700, 96}, .type = type(), .logit_deviation = 2.0});
  HeadUnderTest head(device_.get(), problem);
  const std::vector<float> exact = head.Run(problem).dx;
  for (const DataType dx_type : {DataType::kBFloat16, DataType::kFloat16}) {
    const ChunkOutput output = head.Run(KindOf(problem, dx_type), {RowsOf(problem, 0, 70)}).front();
    const std::vector<unsigned char> rounded = Narrowed(dx_type, exact);
    std::vector<float> expected(exact.size());
    kernels::Convert(dx_type, rounded.data(), DataType::kFloat32, expected.data(),
                     static_cast<int64_t>(expected.size()));
    EXPECT_TRUE(SameBits(output.dx, expected)) << Name(dx_type);
  }
}

TEST_P(Values, GradientScaleMultipliesGradientsAndNotLosses) {
  Problem problem = RandomProblem({.shape = {30, 400, 40}, .type = type(), .logit_deviation = 2.0});
  HeadUnderTest head(device_.get(), problem);
  const std::vector<float> losses = head.Run(problem).losses;
  for (const float scale : {1.0f, -2.5f, 1e-6f, 3e4f}) {
    SCOPED_TRACE(scale);
    problem.gradient_scale = scale;
    const Reference reference = Expected(problem);
    head.backend().ResetGradient();
    const ChunkOutput output = head.Run(problem);
    EXPECT_TRUE(SameBits(output.losses, losses));
    EXPECT_LT(RelativeError(output.dx, reference.dx), GradientTolerance());
    EXPECT_LT(RelativeError(head.Gradient(), reference.dw), GradientTolerance());
  }
  problem.gradient_scale = 0.0f;
  head.backend().ResetGradient();
  EXPECT_TRUE(SameBits(head.Run(problem).losses, losses));
  const std::vector<float> gradient = head.Gradient();
  EXPECT_EQ(std::count(gradient.begin(), gradient.end(), 0.0f), 400 * 40);
}

TEST_P(Values, ManyRowsOfOneLabelAddUp) {
  Problem problem = RandomProblem({.shape = {200, 300, 40}, .type = type(), .logit_deviation = 2.0});
  for (size_t i = 0; i < problem.labels.size(); ++i) problem.labels[i] = i % 5 == 0 ? 299 : 17;
  const Reference reference = Expected(problem);
  HeadUnderTest head(device_.get(), problem);
  const ChunkOutput output = head.Run(problem);
  EXPECT_LT(RelativeError(output.losses, reference.losses), RowTolerance(kLossError));
  EXPECT_LT(RelativeError(output.dx, reference.dx), GradientTolerance());
  EXPECT_LT(RelativeError(head.Gradient(), reference.dw), GradientTolerance());
}

// Whatever their hidden states hold, and whatever the index is.
TEST_P(Values, IgnoredRowsGiveZerosAndChangeNothingElse) {
  const Problem dense = RandomProblem({.shape = {50, 300, 40}, .type = type()});
  HeadUnderTest head(device_.get(), dense);
  const ChunkOutput expected = head.Run(dense);
  const std::vector<float> expected_gradient = head.Gradient();
  Problem sparse = dense;
  sparse.hidden_type = DataType::kFloat32;
  std::vector<float> x(static_cast<size_t>(100 * 40), std::numeric_limits<float>::quiet_NaN());
  const std::vector<float> dense_x = dense.HiddenStates();
  for (const int64_t ignore_index : {kIgnoreIndex, int64_t{-1}, int64_t{1} << 40}) {
    SCOPED_TRACE(ignore_index);
    sparse.labels.assign(100, ignore_index);
    for (int64_t r = 0; r < 50; ++r) {
      sparse.labels[2 * r + 1] = dense.labels[r];
      std::copy_n(dense_x.begin() + r * 40, 40, x.begin() + (2 * r + 1) * 40);
    }
    sparse.hidden_states = Narrowed(DataType::kFloat32, x);
    ChunkInput chunk = RowsOf(sparse, 0, 100);
    chunk.ignore_index = ignore_index;
    head.backend().ResetGradient();
    const ChunkOutput output = head.Run(KindOf(sparse), {chunk}).front();
    const std::vector<float> zeros(40, 0.0f);
    for (int64_t r = 0; r < 50; ++r) {
      EXPECT_EQ(output.losses[2 * r], 0.0f);
      EXPECT_TRUE(SameBits(&output.dx[2 * r * 40], zeros.data(), 40));
      EXPECT_EQ(output.losses[2 * r + 1], expected.losses[r]);
      EXPECT_TRUE(SameBits(&output.dx[(2 * r + 1) * 40], &expected.dx[r * 40], 40));
    }
    EXPECT_TRUE(SameBits(head.Gradient(), expected_gradient));
  }
}

// Up to 2^24, beyond which an fp32 logit has no fraction.
TEST_P(Values, EqualLogitsCostTheLogarithmOfTheVocabulary) {
  for (const int64_t vocab : {1, 2, 777, 50257}) {
    if (!Takes(vocab)) continue;
    for (const float logit : {0.0f, 1.0f, -1.0f, 0x1p24f, -0x1p24f}) {
      SCOPED_TRACE(std::to_string(vocab) + " entries of logit " + std::to_string(logit));
      Problem problem = RandomProblem({.shape = {3, vocab, 4}, .type = type()});
      problem.weight = Narrowed(type(), std::vector<float>(static_cast<size_t>(vocab * 4), 256.0f));
      problem.hidden_states = Narrowed(type(), std::vector<float>(12, logit / 1024));
      HeadUnderTest head(device_.get(), problem);
      for (const float loss : head.Run(problem).losses) {
        EXPECT_FLOAT_EQ(loss, static_cast<float>(std::log(static_cast<double>(vocab))));
      }
      EXPECT_LT(RelativeError(head.Gradient(), Expected(problem).dw), GradientTolerance());
    }
  }
}

TEST_P(Values, OfLossOnlyAreTheSameLossesAndNoGradient) {
  const Problem problem = RandomProblem({.shape = {70, 500, 72}, .type = type(), .logit_deviation = 2.0});
  HeadUnderTest head(device_.get(), problem);
  BatchKey kind = KindOf(problem);
  kind.mode = ComputeMode::kLossOnly;
  const ChunkOutput forward = head.Run(kind, {RowsOf(problem, 0, 70)}).front();
  EXPECT_TRUE(forward.dx.empty());
  EXPECT_TRUE(SameBits(head.Gradient(), std::vector<float>(500 * 72, 0.0f)));
  EXPECT_TRUE(SameBits(forward.losses, head.Run(problem).losses));
}

}  // namespace
}  // namespace lossd::engine::testing::values_test
