// Soft targets on lists, on every device that takes them: each option with them, alone and in pairs, against
// the oracle; and the bits of a row, which depend on nothing beside it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/option_cases.h"

namespace lossd::engine::testing::target_lists_test {
namespace {

using kernels::testing::Beside;
using kernels::testing::OptionCase;
using kernels::testing::RandomProblem;
using kernels::testing::RandomTargets;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;
using kernels::testing::Spread;

constexpr int64_t kTokens = 61;
constexpr int64_t kVocab = 307;
constexpr int64_t kHidden = 45;

constexpr WantedReturns kReturns = {.log_sum_exp = true,
                                    .z_loss = true,
                                    .log_probability = true,
                                    .entropy = true,
                                    .prediction = true,
                                    .target_rank = true,
                                    .divergence = true,
                                    .top_k = 3};

class TargetLists : public HeadTest {
 protected:
  void SetUp() override {
    HeadTest::SetUp();
    if (device_ != nullptr && !device_->TakesTokenLists()) GTEST_SKIP() << "no lists of tokens";
  }

  Problem Rows(double share = 0.1, double mass = 0.8, int64_t tokens = kTokens) const {
    Problem problem =
        RandomProblem({.shape = {tokens, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0});
    for (size_t r = 0; r < problem.labels.size(); r += 5) problem.labels[r] = kIgnoreIndex;
    problem.targets = RandomTargets(problem, share, mass);
    return problem;
  }

  void ExpectAgreement(const Problem& problem) {
    const Reference reference = Expected(problem);
    HeadUnderTest head(device_.get(), problem);
    BatchKey kind = KindOf(problem);
    kind.returns = kReturns;
    const ChunkOutput output = head.Run(kind, {RowsOf(problem, 0, problem.shape.tokens)}).front();
    // Parts of a gradient may cancel; and of fp16 the least of its numbers count.
    const double error = 3 * GradientTolerance();
    EXPECT_LT(RelativeError(output.dx, reference.dx), error);
    EXPECT_LT(RelativeError(head.Gradient(), reference.dw), error);
    if (!problem.bias.empty()) {
      EXPECT_LT(RelativeError(head.BiasGradient(), reference.db), 4 * error);
    }
    for (int64_t r = 0; r < problem.shape.tokens; ++r) ExpectRow(problem, reference, output, r);
  }

  void ExpectNothingToLearn(Problem problem) {
    const Reference reference = Expected(problem);
    for (int64_t r = 0; r < kTokens; ++r) {
      for (int64_t i = problem.targets->offsets[r]; i < problem.targets->offsets[r + 1]; ++i) {
        const int64_t token = problem.targets->tokens[i];
        problem.targets->probabilities[i] =
            problem.labels[r] == kIgnoreIndex
                ? 0.0f
                : static_cast<float>(
                      std::exp(reference.logits[r * kVocab + token] - reference.log_sum_exp[r]));
      }
    }
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput output = head.Run(problem);
    for (const float loss : output.losses) EXPECT_NEAR(loss, 0.0f, 1e-4f);
    for (const float value : output.dx) EXPECT_NEAR(value, 0.0f, 1e-4f);
    for (const float value : head.Gradient()) EXPECT_NEAR(value, 0.0f, 2e-3f);
  }

  void ExpectRow(const Problem& problem, const Reference& reference, const ChunkOutput& output,
                 int64_t row) const {
    const auto r = static_cast<size_t>(row);
    const RowReturnValues& told = output.returns;
    if (problem.labels[r] == kIgnoreIndex) {
      EXPECT_EQ(output.losses[r], 0.0f);
      EXPECT_EQ(told.divergence[r], 0.0f);
      EXPECT_EQ(told.prediction[r], -1);
      return;
    }
    const double error = RowTolerance(2e-5) * (1 + std::fabs(reference.log_sum_exp[r]));
    const double weight = problem.token_weights.empty() ? 1 : std::fabs(problem.token_weights[r]);
    const double z_error = 2 * problem.options.lse_square_scale * reference.log_sum_exp[r] * error;
    EXPECT_NEAR(output.losses[r], reference.losses[r], weight * (4 * error + std::fabs(z_error))) << r;
    EXPECT_NEAR(told.divergence[r], reference.divergence[r], 2 * error) << r;
    EXPECT_NEAR(told.log_sum_exp[r], reference.log_sum_exp[r], error);
    EXPECT_NEAR(told.log_probability[r], reference.log_probability[r], error);
    EXPECT_NEAR(told.entropy[r], reference.entropy[r], 3 * error);
  }
};

INSTANTIATE_TEST_SUITE_P(All, TargetLists, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(TargetLists, EveryPairOfOptionsIsThatOfTheOracle) {
  for (const OptionCase& options : OptionCases(Beside::kLists)) {
    SCOPED_TRACE(options.name);
    Problem problem = Rows();
    options.set(problem);
    ExpectAgreement(problem);
    if (HasFailure()) return;
  }
}

TEST_P(TargetLists, WeightsOfBothLossesAreThoseOfTheOracleWithEveryOption) {
  for (const OptionCase& options : OptionsAlone(Beside::kLists)) {
    SCOPED_TRACE(options.name);
    Problem problem = Rows();
    options.set(problem);
    problem.targets->weight = 0.4f;
    problem.targets->label_weight = 1.5f;
    ExpectAgreement(problem);
    if (HasFailure()) return;
  }
}

TEST_P(TargetLists, ListsOfAnySizeAndMassAreThoseOfTheOracle) {
  for (const double share : {0.0, 0.02, 0.5, 1.0}) {
    for (const double mass : {0.0, 0.3, 0.9999, 1.0}) {
      SCOPED_TRACE(std::to_string(share) + " of the vocabulary, " + std::to_string(mass));
      ExpectAgreement(Rows(share, mass));
      if (HasFailure()) return;
    }
  }
}

// One token with all of the probability is a label.
TEST_P(TargetLists, ATargetOfOneTokenIsALabel) {
  Problem labels = Rows();
  Problem targets = labels;
  labels.targets.reset();
  targets.targets->offsets = {0};
  targets.targets->tokens.clear();
  for (const int64_t label : labels.labels) {
    targets.targets->tokens.push_back(static_cast<int32_t>(std::max<int64_t>(label, 0)));
    targets.targets->offsets.push_back(std::ssize(targets.targets->tokens));
  }
  targets.targets->probabilities.assign(kTokens, 1.0f);
  const Reference expected = Expected(labels);
  HeadUnderTest head(device_.get(), targets);
  const ChunkOutput output = head.Run(targets);
  for (size_t r = 0; r < kTokens; ++r) {
    EXPECT_NEAR(output.losses[r], expected.losses[r], RowTolerance(2e-5) * (1 + expected.losses[r]));
  }
  EXPECT_LT(RelativeError(output.dx, expected.dx), 3 * GradientTolerance());
  EXPECT_LT(RelativeError(head.Gradient(), expected.dw), 3 * GradientTolerance());
}

// What the head has of its own as targets, on a list of all tokens or of some: nothing is to be learned.
TEST_P(TargetLists, TargetsThatTheHeadHasAlreadyGiveNoLossAndNoGradient) {
  for (const double share : {0.3, 1.0}) ExpectNothingToLearn(Rows(share));
}

TEST_P(TargetLists, ARowHasTheSameBitsInAnyCompany) {
  Problem problem = Rows(0.1, 0.8, 300);
  problem.entropy_gradients = Spread(300, -1.0f, 1.0f);
  const BatchKey kind = KindOf(problem);
  HeadUnderTest head(device_.get(), problem);
  const ChunkOutput whole = head.Run(kind, {RowsOf(problem, 0, 300)}).front();
  for (const int64_t size : {1, 7, 100}) {
    std::vector<ChunkInput> chunks;
    for (int64_t first = 0; first < 300; first += size) {
      chunks.push_back(RowsOf(problem, first, std::min(size, 300 - first)));
    }
    // Beside rows that do not count.
    chunks.push_back(RowsOf(problem, 20, 100));
    chunks.back().accumulate = ChunkRows::Accumulate::kNo;
    const std::vector<ChunkOutput> outputs = head.Run(kind, chunks);
    for (int64_t i = 0; i * size < 300; ++i) {
      const int64_t count = std::min(size, 300 - i * size);
      const ChunkOutput& part = outputs[static_cast<size_t>(i)];
      EXPECT_TRUE(SameBits(part.losses.data(), &whole.losses[static_cast<size_t>(i * size)], count));
      EXPECT_TRUE(
          SameBits(part.dx.data(), &whole.dx[static_cast<size_t>(i * size * kHidden)], count * kHidden));
    }
  }
}

TEST_P(TargetLists, LossesAloneHaveTheSameBits) {
  const Problem problem = Rows();
  HeadUnderTest head(device_.get(), problem);
  const ChunkOutput with = head.Run(problem);
  BatchKey kind = KindOf(problem);
  kind.mode = ComputeMode::kLossOnly;
  EXPECT_TRUE(SameBits(head.Run(kind, {RowsOf(problem, 0, kTokens)}).front().losses, with.losses));
}

}  // namespace
}  // namespace lossd::engine::testing::target_lists_test
