// Every loss option of the CUDA step, alone and together, and everything that it tells of rows, against the
// CPU. Names that begin with Small have shapes that compute-sanitizer gets through.
#include <algorithm>
#include <cmath>
#include <set>

#include "tests/gpu/cuda_step_fixture.h"
#include "tests/unit/kernels/option_cases.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::cuda_options_test {
namespace {

using testing::CudaOptions;
using testing::CudaOutcome;
using testing::CudaStepTest;
using testing::Describe;
using testing::kIgnoreIndex;
using testing::OptionCase;
using testing::OptionPaths;
using testing::OptionsAlone;
using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::SameBits;
using testing::SetLogit;
using testing::Shape;

class CudaLossOptions : public CudaStepTest {};

Problem Make(const OptionCase& one, const Shape& shape, DataType type) {
  Problem problem = RandomProblem({.shape = shape, .type = type, .logit_deviation = 2.0});
  problem.gradient_scale = 0.3f;
  one.set(problem);
  return problem;
}

TEST_P(CudaLossOptions, SmallShapesAgreeWithTheCpu) {
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    for (const Shape& shape : {Shape{2, 3, 5}, Shape{7, 257, 33}, Shape{65, 511, 17}, Shape{129, 300, 40}}) {
      SCOPED_TRACE(Describe(shape));
      const Problem problem = Make(one, shape, type());
      ExpectClose(Run(problem, Options()), Expected(problem), ToleranceOf(problem));
    }
  }
}

TEST_P(CudaLossOptions, LargerShapesAgreeWithTheCpu) {
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    for (const Shape& shape : {Shape{300, 96, 300}, Shape{1030, 2099, 72}}) {
      SCOPED_TRACE(Describe(shape));
      const Problem problem = Make(one, shape, type());
      ExpectClose(Run(problem, Options()), Expected(problem), ToleranceOf(problem));
    }
  }
}

TEST_P(CudaLossOptions, SmallTilesAndIgnoredRowsAddUp) {
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    Problem problem = Make(one, {100, 500, 72}, type());
    for (size_t i = 0; i < 100; i += 9) problem.labels[i] = kIgnoreIndex;
    CudaOptions options = Options();
    options.tile_rows = 33;
    Reference reference = Expected(problem);
    ExpectClose(Run(problem, options), reference);
    options.weight_gradient = WeightGradient::kAccumulate;
    options.initial_dw.assign(500 * 72, 0.25f);
    options.initial_db.assign(500, -0.5f);
    for (double& value : reference.dw) value += 0.25;
    for (double& value : reference.db) value -= 0.5;
    ExpectClose(Run(problem, options), reference);
  }
}

TEST_P(CudaLossOptions, SmallRowsWithoutAShareAddNothingToDw) {
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    const Problem problem = Make(one, {60, 400, 64}, type());
    Problem expected = problem;
    CudaOptions options = Options();
    options.shares.assign(60, 1.0f);
    for (size_t i = 1; i < 60; i += 3) {
      options.shares[i] = 0;
      expected.labels[i] = kIgnoreIndex;
    }
    ExpectWeightGradientsClose(Run(problem, options), Expected(expected));
  }
}

// α - β has digits of its own, so that a label's gradient keeps them where it is nearly certain.
TEST_P(CudaLossOptions, SmallGradientsKeepTheirDigitsWhereTheLabelIsNearlyCertain) {
  for (const OptionCase& one : OptionsAlone()) {
    // Those that keep the gradient that small.
    if (!one.name.starts_with("token") && !one.name.starts_with("class") && !one.name.starts_with("logit")) {
      continue;
    }
    SCOPED_TRACE(one.name);
    Problem problem = Make(one, {20, 300, 64}, type());
    // Probabilities of the others that the head's type can hold: fp16's end at 6e-5.
    const float logit = type() == DataType::kFloat16 ? 6.0f : 18.0f;
    const float far = logit / problem.options.logit_scale;
    for (int64_t row = 0; row < 20; ++row) SetLogit(problem, row, problem.labels[row], far);
    const Reference reference = Expected(problem);
    const CudaOutcome outcome = Run(problem, Options());
    EXPECT_LT(RelativeError(outcome.losses, reference.losses), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.dx, reference.dx), Tolerance());
    ExpectWeightGradientsClose(outcome, reference);
  }
}

TEST_P(CudaLossOptions, RowsDoNotDependOnTheRowsBesideThem) {
  constexpr int64_t kHidden = 72;
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    const Problem whole = Make(one, {520, 1500, kHidden}, type());
    CudaOptions options = Options();
    options.tile_rows = 520;
    options.whole_rows = true;
    options.top_k = 3;
    const CudaOutcome expected = Run(whole, options);
    const std::vector<std::pair<int64_t, int64_t>> parts = {{500, 1}, {7, 64}, {33, 128}, {1, 519}};
    for (const auto& [first, count] : parts) {
      SCOPED_TRACE("rows " + std::to_string(first) + " + " + std::to_string(count));
      const CudaOutcome outcome = Run(testing::PartOf(whole, first, count), options);
      const auto slice = [first = first, count = count](const auto& values, int64_t width) {
        return std::vector(values.begin() + first * width, values.begin() + (first + count) * width);
      };
      EXPECT_TRUE(SameBits(outcome.losses, slice(expected.losses, 1)));
      EXPECT_TRUE(SameBits(outcome.log_sum_exps, slice(expected.log_sum_exps, 1)));
      EXPECT_TRUE(SameBits(outcome.entropies, slice(expected.entropies, 1)));
      EXPECT_TRUE(SameBits(outcome.dx, slice(expected.dx, kHidden)));
      EXPECT_EQ(outcome.predictions, slice(expected.predictions, 1));
      EXPECT_EQ(outcome.ranks, slice(expected.ranks, 1));
      EXPECT_EQ(outcome.top_tokens, slice(expected.top_tokens, 3));
    }
  }
}

TEST_P(CudaLossOptions, ResultsDoNotDependOnTheChoiceOfExponents) {
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    const Problem problem = Make(one, {200, 1500, 72}, type());
    const CudaOutcome expected = Run(problem, Options());
    for (const int32_t bias : {-40, 2, 16}) {
      SCOPED_TRACE(bias);
      CudaOptions options = Options();
      options.exponent_bias = bias;
      const CudaOutcome outcome = Run(problem, options);
      EXPECT_TRUE(SameBits(outcome.losses, expected.losses));
      EXPECT_TRUE(SameBits(outcome.dx, expected.dx));
      EXPECT_TRUE(SameBits(outcome.dw, expected.dw));
      EXPECT_TRUE(SameBits(outcome.db, expected.db));
    }
  }
}

TEST_P(CudaLossOptions, SmallRowsFarAboveTheSampleAreRedoneExactly) {
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    Problem problem = Make(one, {60, 900, 80}, type());
    for (int64_t row = 10; row < 14; ++row) SetLogit(problem, row, 333, 500.0f);
    const Reference reference = Expected(problem);
    const CudaOutcome outcome = Run(problem, Options());
    EXPECT_LT(RelativeError(outcome.losses, reference.losses), kRowTolerance);
    ExpectWeightGradientsClose(outcome, reference);
  }
}

TEST_P(CudaLossOptions, SmallRowsThatOverflowAreNaNAloneAndNeverReachDw) {
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    Problem problem = Make(one, {60, 900, 40}, type());
    std::vector<float> x = problem.HiddenStates();
    for (size_t h = 0; h < 40; ++h) x[7 * 40 + h] = 3.4e38f;  // infinite in 16 bits
    Problem expected = problem;
    expected.labels[7] = kIgnoreIndex;
    problem.hidden_type = DataType::kFloat32;
    problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
    CudaOptions options = Options();
    options.whole_rows = true;
    options.top_k = 2;
    const CudaOutcome outcome = Run(problem, options);
    for (const std::vector<float>* values :
         {&outcome.losses, &outcome.log_sum_exps, &outcome.log_probabilities, &outcome.entropies}) {
      EXPECT_TRUE(std::isnan((*values)[7]));
      EXPECT_EQ(CountNonFinite(DataType::kFloat32, values->data(), 60), 1);
    }
    EXPECT_EQ(outcome.predictions[7], -1);
    EXPECT_EQ(outcome.ranks[7], -1);
    EXPECT_EQ(outcome.top_tokens[15], -1);
    EXPECT_TRUE(std::isnan(outcome.top_log_probabilities[15]));
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, &outcome.dx[7 * 40], 40), 40);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.dx.data(), 60 * 40), 40);
    ExpectWeightGradientsClose(outcome, Expected(expected));
  }
}

TEST_P(CudaLossOptions, SmallBatchWithAHugeGradientScaleNeverMakesDwNaN) {
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    Problem problem = Make(one, {60, 900, 40}, type());
    problem.gradient_scale = 3e38f;
    const CudaOutcome outcome = Run(problem, Options());
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.dw.data(), 900 * 40), 0);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.db.data(), std::ssize(outcome.db)), 0);
  }
}

// What takes whole rows

// Tokens and ranks are judged by the reference's logits, up to what the product may be off.
void ExpectWholeRows(const CudaOutcome& outcome, const Problem& problem, const Reference& reference,
                     int32_t top_k) {
  const auto vocab = static_cast<size_t>(problem.shape.vocab);
  EXPECT_LT(RelativeError(outcome.entropies, reference.entropy), CudaStepTest::kRowTolerance);
  for (size_t r = 0; r < problem.labels.size(); ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    if (problem.labels[r] == kIgnoreIndex) {
      EXPECT_EQ(outcome.predictions[r], -1);
      EXPECT_EQ(outcome.entropies[r], 0);
      continue;
    }
    const double* s = &reference.logits[r * vocab];
    std::vector<double> sorted(s, s + vocab);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const double slack = 1e-4 * std::max(1.0, std::max(std::abs(sorted.front()), std::abs(sorted.back())));
    EXPECT_GE(s[outcome.predictions[r]], sorted[0] - slack);
    const double own = s[problem.labels[r]];
    const auto above = [&](double bound) {
      return std::count_if(sorted.begin(), sorted.end(), [&](double logit) { return logit > bound; });
    };
    EXPECT_GE(outcome.ranks[r], above(own + slack));
    EXPECT_LE(outcome.ranks[r], above(own - slack) - 1);
    const int32_t* tokens = &outcome.top_tokens[r * static_cast<size_t>(top_k)];
    EXPECT_EQ(std::set<int32_t>(tokens, tokens + top_k).size(), static_cast<size_t>(top_k));
    EXPECT_EQ(tokens[0], outcome.predictions[r]);
    for (int32_t i = 0; i < top_k; ++i) {
      EXPECT_GE(s[tokens[i]], sorted[static_cast<size_t>(i)] - slack);
      EXPECT_NEAR(outcome.top_log_probabilities[r * static_cast<size_t>(top_k) + static_cast<size_t>(i)],
                  s[tokens[i]] - reference.log_sum_exp[r], 2 * slack);
    }
  }
}

TEST_P(CudaLossOptions, SmallWholeRowsAgreeWithTheCpu) {
  for (const OptionCase& one : OptionPaths()) {
    SCOPED_TRACE(one.name);
    for (const auto& [shape, top_k] : {std::pair{Shape{1, 1, 1}, 1},
                                       {Shape{7, 70, 33}, 64},
                                       {Shape{65, 511, 17}, 1},
                                       {Shape{129, 1300, 40}, 10}}) {
      SCOPED_TRACE(Describe(shape));
      Problem problem = Make(one, shape, type());
      if (shape.tokens > 3) problem.labels[2] = kIgnoreIndex;
      CudaOptions options = Options();
      options.whole_rows = true;
      options.top_k = top_k;
      ExpectWholeRows(Run(problem, options), problem, Expected(problem), top_k);
    }
  }
}

TEST_P(CudaLossOptions, WholeRowsOfALargeVocabularyAgreeWithTheCpu) {
  Problem problem = RandomProblem({.shape = {40, 50257, 123}, .type = type(), .logit_deviation = 3.0});
  CudaOptions options = Options();
  options.whole_rows = true;
  options.top_k = kMostTopK;
  options.tile_rows = 16;
  ExpectWholeRows(Run(problem, options), problem, Expected(problem), kMostTopK);
}

TEST_P(CudaLossOptions, SmallTiesGoToTheLowerToken) {
  Problem problem = RandomProblem({.shape = {5, 900, 40}, .type = type()});
  // Every third entry is the same, and so is its logit.
  const auto row_bytes = static_cast<int64_t>(40 * SizeOf(type()));
  for (int64_t v = 0; v < 900; ++v) {
    std::copy_n(problem.weight.begin() + v % 3 * row_bytes, row_bytes,
                problem.weight.begin() + v * row_bytes);
  }
  CudaOptions options = Options();
  options.whole_rows = true;
  options.top_k = 20;
  const CudaOutcome outcome = Run(problem, options);
  const Reference reference = Expected(problem);
  for (size_t r = 0; r < 5; ++r) {
    const double* s = &reference.logits[r * 900];
    const auto best = static_cast<int32_t>(std::max_element(s, s + 3) - s);
    EXPECT_EQ(outcome.predictions[r], best);
    for (int32_t i = 0; i < 20; ++i) {
      EXPECT_EQ(outcome.top_tokens[r * 20 + static_cast<size_t>(i)], best + 3 * i);
    }
    const auto above = std::count_if(s, s + 3, [&](double one) { return one > s[problem.labels[r] % 3]; });
    EXPECT_EQ(outcome.ranks[r], 300 * above);
  }
}

TEST_P(CudaLossOptions, SmallTellingOfWholeRowsChangesNothingElse) {
  const Problem problem = Make(OptionPaths().back(), {140, 700, 96}, type());
  CudaOptions options = Options();
  options.tile_rows = 70;
  const CudaOutcome without = Run(problem, options);
  options.whole_rows = true;
  options.top_k = 5;
  const CudaOutcome with = Run(problem, options);
  EXPECT_TRUE(SameBits(with.losses, without.losses));
  EXPECT_TRUE(SameBits(with.dx, without.dx));
  EXPECT_TRUE(SameBits(with.dw, without.dw));
}

INSTANTIATE_TEST_SUITE_P(All, CudaLossOptions, testing::EveryVariant(), testing::VariantName);

}  // namespace
}  // namespace lossd::kernels::cuda_options_test
