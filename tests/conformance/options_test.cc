// Every option of the loss and everything told of a row, alone and in pairs: the CPU device against fp64, the
// others against the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/option_cases.h"

namespace lossd::engine::testing::options_test {
namespace {

using kernels::testing::OptionProblem;
using kernels::testing::OptionProblems;
using kernels::testing::Reference;
using kernels::testing::SameBits;

// The error of losses and of what is told of a row, relative to the sizes that it is made of: fp32's, some
// operations on.
constexpr double kRowError = 2e-5;

double Norm(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

double Distance(const std::vector<float>& actual, const std::vector<double>& expected) {
  double sum = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(actual[i])) return std::numeric_limits<double>::infinity();
    sum += (actual[i] - expected[i]) * (actual[i] - expected[i]);
  }
  return std::sqrt(sum);
}

// How large the terms of dX, dW and db are: they may cancel in the sum, and what is rounded are the terms.
struct Sizes {
  double dx = 0;
  double dw = 0;
  double db = 0;
};

// The sizes of a label's own part, as if its p were 0.
Sizes SizesOfLabels(const Problem& problem) {
  const auto hidden = static_cast<size_t>(problem.shape.hidden);
  const std::vector<float> weight = problem.Weight();
  const std::vector<float> x = problem.HiddenStates();
  double dx = 0;
  double dw = 0;
  double db = 0;
  for (size_t r = 0; r < problem.labels.size(); ++r) {
    if (problem.labels[r] == kIgnoreIndex) continue;
    const auto label = static_cast<size_t>(problem.labels[r]);
    double factor = problem.gradient_scale * problem.options.logit_scale;
    if (!problem.token_weights.empty()) factor *= problem.token_weights[r];
    if (!problem.class_weights.empty()) factor *= problem.class_weights[label];
    const auto square = [factor](float value) { return factor * factor * value * value; };
    for (size_t h = 0; h < hidden; ++h) {
      dx += square(weight[label * hidden + h]);
      dw += square(x[r * hidden + h]);
    }
    db += square(1.0f);
  }
  return {std::sqrt(dx), std::sqrt(dw), std::sqrt(db)};
}

Sizes SizesOfTerms(const Problem& problem, const Reference& whole,
                   const std::function<Reference(const Problem&)>& expected) {
  const Sizes labels = SizesOfLabels(problem);
  // What rows add to db has no sign of x's to keep it from cancelling, whatever the options.
  Sizes sizes{Norm(whole.dx), Norm(whole.dw), Norm(whole.db) + labels.db};
  if (problem.options.label_smoothing > 0) {
    sizes.dx += labels.dx;
    sizes.dw += labels.dw;
  }
  const auto add = [&](const std::function<void(Problem&)>& change) {
    Problem part = problem;
    change(part);
    const Reference reference = expected(part);
    sizes.dx += Norm(reference.dx);
    sizes.dw += Norm(reference.dw);
    sizes.db += Norm(reference.db);
  };
  if (problem.options.label_smoothing > 0) add([](Problem& p) { p.options.label_smoothing = 0; });
  if (problem.options.lse_square_scale > 0) add([](Problem& p) { p.options.lse_square_scale = 0; });
  if (!problem.lse_gradients.empty()) add([](Problem& p) { p.lse_gradients.clear(); });
  if (!problem.entropy_gradients.empty()) add([](Problem& p) { p.entropy_gradients.clear(); });
  return sizes;
}

// What a row may be off by, as a share of the sizes that it is made of.
struct RowErrors {
  double values = 0;
  double logits = 0;
};

// One row's own, against the oracle's logits s.
class RowCheck {
 public:
  RowCheck(const Problem& problem, const Reference& reference, int64_t row, RowErrors errors)
      : logits_(&reference.logits[static_cast<size_t>(row * problem.shape.vocab)],
                static_cast<size_t>(problem.shape.vocab)),
        label_(problem.labels[static_cast<size_t>(row)]),
        log_sum_exp_(reference.log_sum_exp[static_cast<size_t>(row)]),
        errors_(errors) {
    for (const double s : logits_) size_ = std::max(size_, 1 + std::fabs(s));
  }

  // As large as the numbers that ℓ and a loss are the sum of.
  double size() const { return size_; }
  double error() const { return errors_.values * size_; }

  void Prediction(int32_t token) const { ExpectAmongTheBest(token, 0); }

  void TargetRank(int32_t rank) const {
    const double own = logits_[static_cast<size_t>(label_)];
    EXPECT_GE(rank, CountAbove(own + slack())) << "rank";
    EXPECT_LE(rank, CountAbove(own - slack())) << "rank";
  }

  void Top(std::span<const int32_t> tokens, std::span<const float> log_probabilities) const {
    for (size_t i = 0; i < tokens.size(); ++i) {
      ExpectAmongTheBest(tokens[i], static_cast<int64_t>(i));
      EXPECT_EQ(std::ranges::count(tokens, tokens[i]), 1) << "top token " << tokens[i] << " twice";
      const auto at = static_cast<size_t>(std::clamp<int64_t>(tokens[i], 0, std::ssize(logits_) - 1));
      EXPECT_NEAR(log_probabilities[i], logits_[at] - log_sum_exp_, std::max(error(), kRowError * size_));
      if (i > 0) {
        EXPECT_LE(log_probabilities[i], log_probabilities[i - 1]);
      }
    }
  }

 private:
  double slack() const { return errors_.logits * size_; }
  int64_t CountAbove(double value) const {
    int64_t count = 0;
    for (int64_t v = 0; v < std::ssize(logits_); ++v) {
      if (v != label_ && logits_[static_cast<size_t>(v)] > value) ++count;
    }
    return count;
  }
  // That it may stand at this place of the order of all tokens.
  void ExpectAmongTheBest(int32_t token, int64_t place) const {
    ASSERT_GE(token, 0);
    ASSERT_LT(token, std::ssize(logits_));
    std::vector<double> sorted(logits_.begin(), logits_.end());
    std::ranges::sort(sorted, std::greater<>());
    EXPECT_NEAR(logits_[static_cast<size_t>(token)], sorted[static_cast<size_t>(place)], slack())
        << "token " << token << " at place " << place;
  }

  const std::span<const double> logits_;
  const int64_t label_;
  const double log_sum_exp_;
  const RowErrors errors_;
  double size_ = 1;
};

class Options : public HeadTest {
 protected:
  // Over ranks logits have the CPU's bits, and so tokens and counts are the same. One rank has one segment,
  // and with it the bits of everything.
  bool same_bits() const { return oracle() == Oracle::kCpu && ranks() == 1; }
  RowErrors Errors() const {
    const double error = same_bits() ? 0 : RowTolerance(kRowError);
    return {error, oracle() == Oracle::kCpu ? 0 : error};
  }
  double GradientErrors() const { return same_bits() ? 0 : GradientTolerance(); }

  void ExpectRow(const Problem& problem, const Reference& reference, const ChunkOutput& output, int64_t row) {
    const auto r = static_cast<size_t>(row);
    const RowReturnValues& told = output.returns;
    const auto top_k = static_cast<size_t>(wanted_.top_k);
    const auto tokens = std::span(told.top_tokens).subspan(r * top_k, top_k);
    const auto log_probabilities = std::span(told.top_log_probabilities).subspan(r * top_k, top_k);
    if (problem.labels[r] == kIgnoreIndex) {
      for (const float value : {output.losses[r], told.log_sum_exp[r], told.z_loss[r],
                                told.log_probability[r], told.entropy[r]}) {
        EXPECT_EQ(value, 0.0f);
      }
      for (const int32_t value : {told.prediction[r], told.target_rank[r]}) EXPECT_EQ(value, -1);
      for (const int32_t token : tokens) EXPECT_EQ(token, -1);
      for (const float value : log_probabilities) EXPECT_EQ(value, 0.0f);
      return;
    }
    const RowCheck check(problem, reference, row, Errors());
    const double a = problem.token_weights.empty() ? 1.0 : std::fabs(problem.token_weights[r]);
    const double z_error = a * problem.options.lse_square_scale * check.size() * check.error();
    EXPECT_NEAR(output.losses[r], reference.losses[r], 2 * a * check.error() + z_error);
    EXPECT_NEAR(told.z_loss[r], reference.z_loss[r], z_error);
    EXPECT_NEAR(told.log_sum_exp[r], reference.log_sum_exp[r], check.error());
    EXPECT_NEAR(told.log_probability[r], reference.log_probability[r], check.error());
    EXPECT_NEAR(told.entropy[r], reference.entropy[r], check.error());
    check.Prediction(told.prediction[r]);
    check.TargetRank(told.target_rank[r]);
    check.Top(tokens, log_probabilities);
  }

  void ExpectAgreement(const OptionProblem& one) {
    const Problem& problem = one.problem;
    SCOPED_TRACE(one.name);
    const Reference reference = Expected(problem);
    const Sizes sizes =
        SizesOfTerms(problem, reference, [this](const Problem& part) { return Expected(part); });
    wanted_ = kAllReturns;
    wanted_.top_k = static_cast<int32_t>(std::min<int64_t>(problem.shape.vocab, 5));
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput output = head.Run(problem, wanted_);
    EXPECT_LE(Distance(output.dx, reference.dx), GradientErrors() * sizes.dx);
    EXPECT_LE(Distance(head.Gradient(), reference.dw), GradientErrors() * sizes.dw);
    if (!problem.bias.empty()) {
      EXPECT_LE(Distance(head.BiasGradient(), reference.db), GradientErrors() * sizes.db);
    }
    for (int64_t r = 0; r < problem.shape.tokens; ++r) ExpectRow(problem, reference, output, r);
    ExpectEntropiesAlone(problem, reference, output, head);
  }

  // With neither gradients nor what logits are compared for, a device may make entropies in another way.
  void ExpectEntropiesAlone(const Problem& problem, const Reference& reference, const ChunkOutput& output,
                            HeadUnderTest& head) {
    BatchKey kind = KindOf(problem);
    kind.mode = ComputeMode::kLossOnly;
    kind.returns = {.log_sum_exp = true, .entropy = true};
    const ChunkOutput alone = head.Run(kind, {RowsOf(problem, 0, problem.shape.tokens)}).front();
    EXPECT_TRUE(SameBits(alone.losses, output.losses));
    EXPECT_TRUE(SameBits(alone.returns.log_sum_exp, output.returns.log_sum_exp));
    for (int64_t row = 0; row < problem.shape.tokens; ++row) {
      const auto r = static_cast<size_t>(row);
      const bool ignored = problem.labels[r] == kIgnoreIndex;
      const double slack = ignored ? 0.0 : RowCheck(problem, reference, row, Errors()).error();
      EXPECT_NEAR(alone.returns.entropy[r], ignored ? 0.0 : reference.entropy[r], slack) << "row " << row;
    }
  }

  WantedReturns wanted_;
};

INSTANTIATE_TEST_SUITE_P(All, Options, ::testing::ValuesIn(DevicesAndTypesForOptions()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Options, AgreeWithTheOracleAloneAndInPairs) {
  for (const OptionProblem& one : OptionProblems(type())) ExpectAgreement(one);
}

}  // namespace
}  // namespace lossd::engine::testing::options_test
