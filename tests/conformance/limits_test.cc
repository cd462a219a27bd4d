// The ends of what a head takes: numbers out of range, sizes out of reach, and the memory that it says it
// has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing::limits_test {
namespace {

using kernels::CountNonFinite;
using kernels::testing::Narrowed;
using kernels::testing::RandomProblem;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;
using kernels::testing::SetLogit;
using ::testing::HasSubstr;

class Limits : public HeadTest {};

INSTANTIATE_TEST_SUITE_P(All, Limits, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

int64_t NonFinite(const std::vector<float>& values) {
  return CountNonFinite(DataType::kFloat32, values.data(), static_cast<int64_t>(values.size()));
}

TEST_P(Limits, RowsFarAboveTheFirstEstimateAreExactAndLeaveTheOthersAlone) {
  for (const float value : {150.0f, 2e4f, 3e7f, 1e30f}) {
    if (type() == DataType::kFloat16 && value > 6e4f) continue;
    SCOPED_TRACE(value);
    Problem problem = RandomProblem({.shape = {60, 900, 80}, .type = type()});
    for (int64_t row = 10; row < 14; ++row) SetLogit(problem, row, 333, value);
    problem.labels[11] = 333;
    const Reference reference = Expected(problem);
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput output = head.Run(problem);
    EXPECT_LT(RelativeError(output.losses, reference.losses), RowTolerance(1e-5));
    EXPECT_GE(output.losses[11], 0.0f);
    EXPECT_LT(output.losses[11], 1e-20f);  // the label's probability is 1 but for that
    EXPECT_LT(RelativeError(head.Gradient(), reference.dw), GradientTolerance());
    for (int64_t row = 10; row < 14; ++row) problem.labels[row] = kIgnoreIndex;
    const ChunkOutput without = head.Run(problem);
    for (int64_t row = 0; row < 60; ++row) {
      if (row >= 10 && row < 14) continue;
      EXPECT_EQ(output.losses[row], without.losses[row]) << row;
      EXPECT_TRUE(SameBits(&output.dx[row * 80], &without.dx[row * 80], 80)) << row;
    }
  }
}

// Finite where it came from, infinite in 16 bits or in the logits.
TEST_P(Limits, ARowThatOverflowsIsNaNAloneAndNeverReachesDw) {
  Problem problem = RandomProblem({.shape = {60, 900, 40}, .type = type()});
  std::vector<float> x = problem.HiddenStates();
  std::fill_n(x.begin() + 7 * 40, 40, 3.4e38f);
  problem.hidden_type = DataType::kFloat32;
  problem.hidden_states = Narrowed(DataType::kFloat32, x);
  problem.bias.assign(900, 0.5f);
  Problem without = problem;
  without.labels[7] = kIgnoreIndex;
  HeadUnderTest head(device_.get(), problem);
  const ChunkOutput expected = head.Run(without);
  const std::vector<float> expected_gradient = head.Gradient();
  const std::vector<float> expected_bias = head.BiasGradient();
  head.backend().ResetGradient();
  // Gathered with a chunk of another client's.
  const std::vector<ChunkOutput> outputs =
      head.Run(KindOf(problem), {RowsOf(problem, 0, 20), RowsOf(problem, 20, 40)});
  EXPECT_TRUE(std::isnan(outputs[0].losses[7]));
  EXPECT_EQ(NonFinite(outputs[0].losses) + NonFinite(outputs[1].losses), 1);
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, &outputs[0].dx[7 * 40], 40), 40);
  EXPECT_EQ(NonFinite(outputs[0].dx) + NonFinite(outputs[1].dx), 40);
  std::vector<float> dx = outputs[0].dx;
  dx.insert(dx.end(), outputs[1].dx.begin(), outputs[1].dx.end());
  for (int64_t row = 0; row < 60; ++row) {
    if (row == 7) continue;
    EXPECT_TRUE(SameBits(&dx[row * 40], &expected.dx[row * 40], 40)) << row;
  }
  EXPECT_LT(RelativeError(head.Gradient(), {expected_gradient.begin(), expected_gradient.end()}), 1e-5);
  EXPECT_LT(RelativeError(head.BiasGradient(), {expected_bias.begin(), expected_bias.end()}), 1e-5);
}

// As a mask does it: such logits are nothing to the entropy, however far they are from the others.
TEST_P(Limits, EntriesThatABiasRulesOutHaveNoPartInTheEntropyAndItsGradient) {
  for (const float mask : {-1e9f, -1e30f, -4e37f}) {
    for (const float weight : {0.0f, 1.0f}) {
      SCOPED_TRACE(std::to_string(mask) + " " + std::to_string(weight));
      Problem problem = RandomProblem({.shape = {60, 900, 40}, .type = type()});
      problem.bias.assign(900, 0.0f);
      for (size_t v = 0; v < 900; v += 3) problem.bias[v] = mask;
      for (int64_t& label : problem.labels) label += label % 3 == 0 ? 1 : 0;
      problem.token_weights.assign(60, weight);
      for (int r = 0; r < 60; ++r) problem.entropy_gradients.push_back(static_cast<float>(r % 4) - 1.0f);
      const Reference reference = Expected(problem);
      HeadUnderTest head(device_.get(), problem);
      const ChunkOutput output = head.Run(problem);
      EXPECT_LT(RelativeError(output.dx, reference.dx), 2 * GradientTolerance());
      EXPECT_LT(RelativeError(head.Gradient(), reference.dw), GradientTolerance());
      EXPECT_LT(RelativeError(head.BiasGradient(), reference.db), GradientTolerance());
      problem.entropy_gradients.clear();
      BatchKey kind = KindOf(problem);
      kind.mode = ComputeMode::kLossOnly;
      kind.returns = {.entropy = true};
      const ChunkOutput alone = head.Run(kind, {RowsOf(problem, 0, 60)}).front();
      for (size_t r = 0; r < 60; ++r) {
        EXPECT_NEAR(alone.returns.entropy[r], reference.entropy[r], RowTolerance(1e-4));
      }
    }
  }
}

TEST_P(Limits, AHugeGradientScaleNeverMakesDwNaN) {
  Problem problem = RandomProblem({.shape = {60, 900, 40}, .type = type()});
  problem.gradient_scale = 3e38f;
  HeadUnderTest head(device_.get(), problem);
  head.Run(problem);
  EXPECT_EQ(NonFinite(head.Gradient()), 0);
}

// x is 0, so that dW is too; db is not.
TEST_P(Limits, HugeGradientsOfRowsOfZerosNeverReachDb) {
  for (const float smoothing : {0.0f, 0.1f}) {
    Problem problem = RandomProblem({.shape = {5, 300, 24}, .type = type()});
    problem.bias.assign(300, 0.5f);
    problem.options.label_smoothing = smoothing;
    problem.gradient_scale = 1e20f;
    problem.token_weights = {1, 1, 1e12f, 1, 1};
    const auto row_bytes = static_cast<int64_t>(problem.hidden_states.size() / 5);
    std::fill_n(problem.hidden_states.begin() + 2 * row_bytes, row_bytes, 0);
    HeadUnderTest head(device_.get(), problem);
    EXPECT_TRUE(std::isnan(head.Run(problem).losses[2])) << "the row says so";
    const std::vector<float> gradient = head.BiasGradient();
    head.backend().ResetGradient();
    problem.labels[2] = kIgnoreIndex;
    head.Run(problem);
    const std::vector<float> without = head.BiasGradient();
    EXPECT_LT(RelativeError(gradient, {without.begin(), without.end()}), 1e-6);
  }
}

TEST_P(Limits, RowsOfZerosWithAHugeScaleLeaveOtherClientsDwAlone) {
  const Problem problem = RandomProblem({.shape = {60, 900, 40}, .type = type()});
  ChunkInput faint = RowsOf(problem, 0, 30);
  faint.gradient_scale = 1e-30f;
  ChunkInput zeros = RowsOf(problem, 30, 30);
  std::fill(zeros.hidden_states.begin(), zeros.hidden_states.end(), '\0');
  zeros.gradient_scale = 1e36f;
  HeadUnderTest head(device_.get(), problem);
  head.Run(KindOf(problem), {faint});
  const std::vector<float> expected = head.Gradient();
  head.backend().ResetGradient();
  head.Run(KindOf(problem), {faint, zeros});
  EXPECT_LT(RelativeError(head.Gradient(), {expected.begin(), expected.end()}), GradientError());
}

TEST_P(Limits, DxBeyondTheRangeOfItsTypeIsInfiniteAndDwIsNot) {
  Problem problem = RandomProblem({.shape = {9, 300, 40}, .type = type(), .logit_deviation = 3.0});
  problem.gradient_scale = 1e6f;
  HeadUnderTest head(device_.get(), problem);
  const ChunkOutput exact = head.Run(problem);
  const std::vector<float> gradient = head.Gradient();
  head.backend().ResetGradient();
  const ChunkOutput output = head.Run(KindOf(problem, DataType::kFloat16), {RowsOf(problem, 0, 9)}).front();
  int64_t beyond = 0;
  for (size_t i = 0; i < exact.dx.size(); ++i) {
    if (std::fabs(exact.dx[i]) < 65520.0f) continue;
    ++beyond;
    EXPECT_EQ(output.dx[i], std::copysign(std::numeric_limits<float>::infinity(), exact.dx[i])) << i;
  }
  EXPECT_GT(beyond, 0);
  EXPECT_EQ(NonFinite(output.dx), beyond);
  EXPECT_TRUE(SameBits(head.Gradient(), gradient));
}

TEST_P(Limits, TheLargestChunkIsServed) {
  constexpr int64_t kHidden = 8;
  const Problem problem = RandomProblem({.shape = {kMaxChunkTokens, 50, kHidden}, .type = type()});
  HeadUnderTest head(device_.get(), problem);
  const ChunkOutput output = head.Run(problem);
  for (const int64_t row : {int64_t{0}, kMaxChunkTokens / 2, kMaxChunkTokens - 1}) {
    const ChunkOutput alone = head.Run(KindOf(problem), {RowsOf(problem, row, 1)}).front();
    EXPECT_EQ(output.losses[row], alone.losses[0]);
    EXPECT_TRUE(SameBits(&output.dx[row * kHidden], alone.dx.data(), kHidden));
  }
}

TEST_P(Limits, AHeadHoldsWhatWasPlannedForIt) {
  for (const auto& shape : {kernels::testing::Shape{1, 1, 1}, {1, 50257, 123}, {1, 1000, 256}}) {
    if (!Takes(shape.vocab)) continue;
    Problem problem = RandomProblem({.shape = shape, .type = type()});
    if (shape.vocab == 1000) problem.bias.assign(1000, 0.5f);
    HeadUnderTest head(device_.get(), problem);
    const absl::StatusOr<MemoryPlan> plan = device_->PlanMemory(head.config());
    ASSERT_TRUE(plan.ok()) << plan.status();
    MemoryPlan planned = *plan;
    // The engine's: new weights before they are published.
    std::erase_if(planned, [](const MemoryItem& item) { return item.purpose == "weight_staging"; });
    const MemoryPlan held = head.backend().MemoryReport();
    ASSERT_EQ(held.size(), planned.size());
    for (size_t i = 0; i < held.size(); ++i) {
      EXPECT_EQ(held[i].purpose, planned[i].purpose);
      EXPECT_EQ(held[i].bytes, planned[i].bytes) << held[i].purpose;
      EXPECT_GE(held[i].bytes, LeastPart(shape.vocab * shape.hidden * SizeOf(type())));
    }
    EXPECT_LE(TotalBytes(*plan) + TotalBytes(device_->SharedMemory()), device_->AvailableMemory());
  }
}

TEST_P(Limits, AVocabularyOfWhichNoRowFitsTheWorkspaceIsRefusedBeforeAnythingIsTaken) {
  const HeadConfig config{"h", (int64_t{1} << 31) - 1, int64_t{1} << 20, type()};
  const absl::Status refused = device_->PlanMemory(config).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("vocab_size 2147483647"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--workspace_bytes"));
}

TEST_P(Limits, AHeadThatDoesNotFitIsRefusedAndTheDeviceServesOn) {
  // More than any machine's address space: nothing is tried that could succeed.
  const HeadConfig config{"h", (int64_t{1} << 31) - 1, int64_t{1} << 20, type()};
  const absl::Status refused = device_->CreateHead(config).status();
  // Other ranks plan before they try.
  EXPECT_TRUE(absl::IsResourceExhausted(refused) || (ranks() > 1 && absl::IsInvalidArgument(refused)))
      << refused;
  const Problem problem = RandomProblem({.shape = {20, 300, 40}, .type = type()});
  HeadUnderTest head(device_.get(), problem);
  EXPECT_LT(RelativeError(head.Run(problem).losses, Expected(problem).losses), RowTolerance(1e-5));
}

}  // namespace
}  // namespace lossd::engine::testing::limits_test
