// Lists of kept tokens on every device that takes them: each option with them, alone and in pairs, against
// the oracle; and the bits of a row, which depend on nothing beside it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/option_cases.h"

namespace lossd::engine::testing::kept_tokens_test {
namespace {

using kernels::testing::Beside;
using kernels::testing::KeepTokens;
using kernels::testing::OptionCase;
using kernels::testing::RandomProblem;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;
using kernels::testing::Spread;

constexpr int64_t kTokens = 61;
constexpr int64_t kVocab = 307;
constexpr double kRowError = 2e-5;
// Where lists are short nothing is rounded to 16 bits but what is stored so: the same for every type of head.
constexpr double kGradientError = 3e-6;
// Lists of these shares of so many entries are long on every path of a GPU, on none, and on Hopper's alone.
constexpr int64_t kLargeVocab = 18500;
const std::vector<double> kLongAndShort = {0.9, 0.002, 0.1};
constexpr int64_t kFewTokens = 16;

// What every device can tell of a row over a list.
constexpr WantedReturns kReturns = {.log_sum_exp = true,
                                    .z_loss = true,
                                    .log_probability = true,
                                    .entropy = true,
                                    .prediction = true,
                                    .target_rank = true};

class KeptTokens : public HeadTest {
 protected:
  void SetUp() override {
    HeadTest::SetUp();
    if (device_ != nullptr && !device_->TakesTokenLists()) GTEST_SKIP() << "no lists of tokens";
  }

  Problem Rows(int64_t tokens = kTokens, int64_t vocab = kVocab, int64_t hidden = 45) const {
    Problem problem =
        RandomProblem({.shape = {tokens, vocab, hidden}, .type = type(), .logit_deviation = 2.0});
    for (size_t r = 0; r < problem.labels.size(); r += 5) problem.labels[r] = kIgnoreIndex;
    return problem;
  }

  // How much the terms of a gradient may have cancelled: those of each part alone.
  double Cancelled(const Problem& problem, const Reference& whole,
                   std::vector<double> Reference::*gradient) const {
    Problem part = problem;
    part.lse_gradients.clear();
    part.entropy_gradients.clear();
    part.options.lse_square_scale = 0;
    const auto norm = [](const std::vector<double>& values) {
      double sum = 0;
      for (const double value : values) sum += value * value;
      return std::sqrt(sum);
    };
    const double own = norm(whole.*gradient);
    return own == 0 ? 1 : (own + 2 * norm(Expected(part).*gradient)) / own;
  }

  void ExpectAgreement(const Problem& problem, double gradient_error = kGradientError) {
    const Reference reference = Expected(problem);
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput output = head.Run(problem, kReturns);
    const auto error = [&](std::vector<double> Reference::*gradient) {
      const double of_oracle = oracle() == Oracle::kReference ? 0 : kGradientError;
      return (gradient_error + of_oracle) * Cancelled(problem, reference, gradient);
    };
    EXPECT_LT(RelativeError(output.dx, reference.dx), error(&Reference::dx));
    EXPECT_LT(RelativeError(head.Gradient(), reference.dw), error(&Reference::dw));
    if (!problem.bias.empty()) {
      EXPECT_LT(RelativeError(head.BiasGradient(), reference.db), 4 * error(&Reference::db));
    }
    for (int64_t r = 0; r < problem.shape.tokens; ++r) ExpectRow(problem, reference, output, r);
  }

  // `gradient_error`: by which sums of the same terms in other orders may differ.
  void ExpectTheSameBitsInAnyCompany(const Problem& problem, double gradient_error) {
    const int64_t tokens = problem.shape.tokens;
    const BatchKey kind = KindOf(problem);
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput whole = head.Run(kind, {RowsOf(problem, 0, tokens)}).front();
    const std::vector<float> gradient = head.Gradient();
    head.backend().ResetGradient();
    for (const int64_t size : {int64_t{1}, int64_t{7}, tokens / 3}) {
      std::vector<ChunkInput> chunks;
      for (int64_t first = 0; first < tokens; first += size) {
        chunks.push_back(RowsOf(problem, first, std::min(size, tokens - first)));
      }
      // Beside rows that do not count.
      chunks.push_back(RowsOf(problem, tokens / 15, tokens / 3));
      chunks.back().accumulate = ChunkRows::Accumulate::kNo;
      const std::vector<ChunkOutput> outputs = head.Run(kind, chunks);
      for (int64_t i = 0; i * size < tokens; ++i) {
        const int64_t count = std::min(size, tokens - i * size);
        const ChunkOutput& part = outputs[static_cast<size_t>(i)];
        EXPECT_TRUE(SameBits(part.losses.data(), &whole.losses[static_cast<size_t>(i * size)], count));
        EXPECT_TRUE(SameBits(part.dx.data(), &whole.dx[static_cast<size_t>(i * size * 45)], count * 45));
      }
      EXPECT_LT(RelativeError(head.Gradient(), {gradient.begin(), gradient.end()}), gradient_error);
      head.backend().ResetGradient();
    }
  }

  void ExpectRow(const Problem& problem, const Reference& reference, const ChunkOutput& output,
                 int64_t row) const {
    const auto r = static_cast<size_t>(row);
    const RowReturnValues& told = output.returns;
    if (problem.labels[r] == kIgnoreIndex) {
      EXPECT_EQ(output.losses[r], 0.0f);
      EXPECT_EQ(told.entropy[r], 0.0f);
      EXPECT_EQ(told.prediction[r], -1);
      return;
    }
    const double* logits = &reference.logits[r * static_cast<size_t>(problem.shape.vocab)];
    double largest = 0;
    int64_t above = 0;
    for (int64_t v = 0; v < problem.shape.vocab; ++v) {
      if (!std::isfinite(logits[v])) continue;
      largest = std::max(largest, std::fabs(logits[v]));
      above += logits[v] > logits[problem.labels[r]] ? 1 : 0;
    }
    const double error = RowTolerance(kRowError) * (1 + largest) * (1 + largest);
    EXPECT_NEAR(output.losses[r], reference.losses[r], 3 * error);
    EXPECT_NEAR(told.log_sum_exp[r], reference.log_sum_exp[r], error);
    EXPECT_NEAR(told.z_loss[r], reference.z_loss[r], error);
    EXPECT_NEAR(told.log_probability[r], reference.log_probability[r], error);
    EXPECT_NEAR(told.entropy[r], reference.entropy[r], error);
    ASSERT_GE(told.prediction[r], 0);
    EXPECT_NEAR(logits[told.prediction[r]], *std::max_element(logits, logits + problem.shape.vocab), error);
    EXPECT_NEAR(told.target_rank[r], above, 1);
  }
};

INSTANTIATE_TEST_SUITE_P(All, KeptTokens, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(KeptTokens, EveryPairOfOptionsIsThatOfTheOracle) {
  for (const OptionCase& options : OptionCases(Beside::kLists)) {
    SCOPED_TRACE(options.name);
    Problem problem = Rows();
    options.set(problem);
    KeepTokens(problem, 0.1);
    ExpectAgreement(problem);
    if (HasFailure()) return;
  }
}

TEST_P(KeptTokens, ListsOfAnySizeAreThoseOfTheOracle) {
  for (const double share : {0.0, 0.003, 0.5, 1.0}) {
    for (const int64_t hidden : {1, 8, 263}) {
      SCOPED_TRACE(std::to_string(share) + " of the vocabulary, hidden " + std::to_string(hidden));
      Problem problem = Rows(kTokens, kVocab, hidden);
      problem.entropy_gradients = Spread(kTokens, -1.0f, 1.0f);
      KeepTokens(problem, share);
      ExpectAgreement(problem);
    }
  }
}

TEST_P(KeptTokens, ARowWithOneTokenHasNoLossAndNoGradient) {
  Problem problem = Rows();
  KeepTokens(problem, 0.0);
  HeadUnderTest head(device_.get(), problem);
  const ChunkOutput output = head.Run(problem, kReturns);
  for (const float loss : output.losses) EXPECT_EQ(loss, 0.0f);
  for (const float value : output.dx) EXPECT_EQ(value, 0.0f);
  for (const float value : head.Gradient()) EXPECT_EQ(value, 0.0f);
}

// On the CPU lists of any length are computed alike.
TEST_P(KeptTokens, LongListsBesideShortOnesAreThoseOfTheOracle) {
  std::vector<OptionCase> cases = {AllOptions(Beside::kLists)};
  if (oracle() != Oracle::kReference) cases = OptionsAlone(Beside::kLists);
  for (const OptionCase& options : cases) {
    SCOPED_TRACE(options.name);
    Problem problem = Rows(kFewTokens, kLargeVocab);
    options.set(problem);
    KeepTokens(problem, kLongAndShort);
    ExpectAgreement(problem, 3 * GradientError());
    if (HasFailure()) return;
  }
}

TEST_P(KeptTokens, ARowHasTheSameBitsInAnyCompany) {
  Problem problem = Rows(300);
  problem.entropy_gradients = Spread(300, -1.0f, 1.0f);
  KeepTokens(problem, 0.1);
  ExpectTheSameBitsInAnyCompany(problem, 1e-5);
}

TEST_P(KeptTokens, ARowWithALongListHasTheSameBitsInAnyCompany) {
  Problem problem = Rows(60, kLargeVocab);
  problem.entropy_gradients = Spread(60, -1.0f, 1.0f);
  KeepTokens(problem, kLongAndShort);
  ExpectTheSameBitsInAnyCompany(problem, GradientError());
}

TEST_P(KeptTokens, TheSameCallsGiveTheSameGradient) {
  Problem short_lists = Rows(300);
  KeepTokens(short_lists, 0.2);
  Problem long_lists = Rows(60, kLargeVocab);
  KeepTokens(long_lists, kLongAndShort);
  for (const Problem& problem : {short_lists, long_lists}) {
    std::vector<float> first;
    for (int i = 0; i < 3; ++i) {
      HeadUnderTest head(device_.get(), problem);
      head.Run(problem);
      Problem plain = problem;
      plain.kept_offsets.clear();
      head.Run(plain);  // batches without lists add to the same dW
      head.Run(problem);
      const std::vector<float> gradient = head.Gradient();
      if (i == 0) first = gradient;
      EXPECT_TRUE(SameBits(gradient, first));
    }
  }
}

TEST_P(KeptTokens, LossesAloneHaveTheSameBits) {
  Problem problem = Rows(kTokens, kLargeVocab);
  KeepTokens(problem, kLongAndShort);
  HeadUnderTest head(device_.get(), problem);
  const ChunkOutput with = head.Run(problem);
  BatchKey kind = KindOf(problem);
  kind.mode = ComputeMode::kLossOnly;
  EXPECT_TRUE(SameBits(head.Run(kind, {RowsOf(problem, 0, kTokens)}).front().losses, with.losses));
}

}  // namespace
}  // namespace lossd::engine::testing::kept_tokens_test
