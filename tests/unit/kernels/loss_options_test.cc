// Every loss option, alone and together, in every arithmetic against the fp64 reference; returns are tested
// in row_returns_test.cc, and what holds on every device in tests/conformance.
#include <gtest/gtest.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/gemm.h"
#include "kernels/linear_cross_entropy.h"
#include "tests/unit/kernels/option_cases.h"
#include "tests/unit/kernels/problem.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::loss_options_test {
namespace {

using cpu::Arithmetic;
using testing::AllOptions;
using testing::Describe;
using testing::GuardedBytes;
using testing::OptionCase;
using testing::OptionCases;
using testing::OptionsAlone;
using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::RunReference;
using testing::RunStep;
using testing::SameBits;
using testing::SetLogit;
using testing::Shape;
using testing::Spread;
using testing::StepOptions;
using testing::StepResult;

constexpr int64_t kIgnored = -100;
// Arithmetic and the type of head it takes.
struct Path {
  Arithmetic arithmetic;
  DataType type;
  double tolerance;       // of gradients
  bool same_rows = true;  // whether a row's bits depend on it alone; see docs/numerics.md
};

std::vector<Path> Paths() {
  std::vector<Path> paths = {{Arithmetic::kSimd, DataType::kFloat32, 1e-5},
                             {Arithmetic::kSimd, DataType::kBFloat16, 1e-5},
                             {Arithmetic::kSimd, DataType::kFloat16, 1e-5},
                             {Arithmetic::kLibraryFloat32, DataType::kFloat32, 1e-5, false}};
  if (cpu::HasFastBFloat16()) paths.push_back({Arithmetic::kLibraryBFloat16, DataType::kBFloat16, 6e-3});
  return paths;
}

void ExpectAgreement(const Problem& problem, const StepOptions& options, double tolerance,
                     double loss_tolerance = 1e-5) {
  const Reference reference = RunReference(problem);
  const StepResult result = RunStep(problem, options);
  ASSERT_EQ(result.status, Status::kOk);
  EXPECT_TRUE(result.intact);
  EXPECT_LT(RelativeError(result.losses, reference.losses), loss_tolerance);
  EXPECT_LT(RelativeError(result.log_sum_exp, reference.log_sum_exp), 1e-5);
  EXPECT_LT(RelativeError(result.dx, reference.dx), tolerance);
  EXPECT_LT(RelativeError(result.dw, reference.dw), tolerance);
  if (problem.bias.empty()) return;
  EXPECT_LT(RelativeError(result.db, reference.db), tolerance);
}

// Every arithmetic; the best one of each type of head is tried with more values and shapes in
// tests/conformance.
TEST(LossOptions, EveryPairAgreesWithTheReference) {
  for (const Path& path : Paths()) {
    for (const OptionCase& options : OptionCases()) {
      SCOPED_TRACE(options.name + " " + Name(path.type));
      Problem problem = RandomProblem({.shape = {7, 530, 11}, .type = path.type, .logit_deviation = 2.0});
      problem.labels[5] = kIgnored;
      options.set(problem);
      ExpectAgreement(problem, {.arithmetic = path.arithmetic}, path.tolerance);
      if (HasFailure()) return;
    }
  }
}

TEST(LossOptions, AgreeInEveryShapeAndInSeveralTiles) {
  for (const Shape& shape : {Shape{1, 1, 1}, Shape{1, 2, 1}, Shape{2, 3, 5}, Shape{7, 257, 33},
                             Shape{130, 300, 40}, Shape{300, 96, 300}, Shape{40, 5000, 70}}) {
    for (const Path& path : Paths()) {
      SCOPED_TRACE(Describe(shape) + " " + Name(path.type));
      Problem problem = RandomProblem({.shape = shape, .type = path.type, .logit_deviation = 2.0});
      AllOptions().set(problem);
      ExpectAgreement(problem, {.arithmetic = path.arithmetic}, path.tolerance);
      ExpectAgreement(problem, {.arithmetic = path.arithmetic, .tile_rows = 1}, path.tolerance);
      problem.options.softcap = 0;
      ExpectAgreement(problem, {.arithmetic = path.arithmetic}, path.tolerance);
    }
  }
}

TEST(LossOptions, AgreeWhereTheSoftmaxIsPeakedOrNearUniform) {
  for (const double deviation : {0.01, 10.0}) {
    for (const Path& path : Paths()) {
      for (const OptionCase& option : OptionsAlone()) {
        SCOPED_TRACE(std::to_string(deviation) + " " + option.name + " " + Name(path.type));
        Problem problem =
            RandomProblem({.shape = {40, 2000, 40}, .type = path.type, .logit_deviation = deviation});
        option.set(problem);
        problem.options.softcap *= static_cast<float>(deviation);
        ExpectAgreement(problem, {.arithmetic = path.arithmetic}, path.tolerance);
      }
    }
  }
}

// Nothing but the difference of p and 1/V is left of the gradient, and p is near 1/V.
TEST(LossOptions, SmoothingToUniformKeepsTheDifferenceToIt) {
  for (const Path& path : Paths()) {
    for (const float softcap : {0.0f, 2.0f}) {
      Problem problem = RandomProblem({.shape = {40, 2000, 40}, .type = path.type, .logit_deviation = 0.05});
      problem.options = {.softcap = softcap, .label_smoothing = 1.0f};
      ExpectAgreement(problem, {.arithmetic = path.arithmetic}, path.tolerance);
    }
  }
}

// The label's logit 28 above all others: fp32 cannot tell p_y from 1, and what is left of the gradient is 1 -
// p_y.
TEST(LossOptions, ALabelThatIsNearlyCertainKeepsItsDigits) {
  for (const Path& path : Paths()) {
    if (path.arithmetic == Arithmetic::kLibraryBFloat16) continue;
    for (int options = 0; options < 8; ++options) {
      SCOPED_TRACE(std::to_string(options) + " " + Name(path.type));
      Problem problem = RandomProblem({.shape = {6, 700, 40}, .type = path.type, .logit_deviation = 0.5});
      for (int64_t r = 0; r < 6; ++r) SetLogit(problem, r, problem.labels[r], 30.0f);
      // Those that keep the gradient that small.
      if ((options & 1) != 0) problem.options = {.logit_scale = 0.7f, .softcap = 90.0f};
      if ((options & 2) != 0) problem.class_weights = Spread(700, 0.1f, 2.0f);
      if ((options & 4) != 0) problem.token_weights = Spread(6, -1.0f, 2.0f);
      ExpectAgreement(problem, {.arithmetic = path.arithmetic}, 3e-5, 3e-5);
    }
  }
}

// One entry 28 above all others, the label or another: the entropy's gradient is as small as the other p are.
TEST(LossOptions, AnEntropyNearZeroKeepsTheDigitsOfItsGradient) {
  for (const Path& path : Paths()) {
    if (path.arithmetic == Arithmetic::kLibraryBFloat16) continue;
    for (const bool is_label : {true, false}) {
      for (const float offset : {0.0f, 1e4f}) {
        SCOPED_TRACE(std::string(Name(path.type)) + (is_label ? ", the label " : ", another ") +
                     std::to_string(offset));
        Problem problem = RandomProblem({.shape = {6, 700, 40}, .type = path.type, .logit_deviation = 0.5});
        for (int64_t r = 0; r < 6; ++r) {
          SetLogit(problem, r, is_label ? problem.labels[r] : (problem.labels[r] + 1) % 700, 30.0f);
        }
        if (offset != 0 && path.type != DataType::kFloat32) continue;
        problem.bias.assign(700, offset);
        problem.token_weights.assign(6, 0.0f);
        problem.entropy_gradients.assign(6, 1.0f);
        // Logits of 1e4 have as many digits less.
        ExpectAgreement(problem, {.arithmetic = path.arithmetic}, offset == 0 ? 3e-5 : 3e-3);
      }
    }
  }
}

// So far in the cap's flat part that 1 - (s/c)² has no digit left in fp32.
TEST(LossOptions, SaturatedLogitsKeepTheirDerivative) {
  for (const Path& path : Paths()) {
    Problem problem = RandomProblem({.shape = {6, 300, 40}, .type = path.type, .logit_deviation = 0.5});
    for (int64_t r = 0; r < 6; ++r) SetLogit(problem, r, problem.labels[r], 18.0f);
    problem.options.softcap = 2.0f;
    ExpectAgreement(problem, {.arithmetic = path.arithmetic}, path.tolerance);
    const int64_t hidden = problem.shape.hidden;
    const Reference reference = RunReference(problem);
    const StepResult result = RunStep(problem, {.arithmetic = path.arithmetic});
    for (int64_t r = 0; r < 6; ++r) {
      // dW of the label along the one column that only this row has.
      const int64_t at = problem.labels[r] * hidden + hidden - 1 - r;
      EXPECT_NEAR(result.dw[at] / reference.dw[at], 1.0, 1e-3) << r;
    }
  }
}

TEST(LossOptions, LargeLogitsAreScaledAndCappedExactly) {
  for (const float value : {120.0f, 1e4f, 3e7f, 1e30f}) {
    for (const float softcap : {0.0f, 30.0f}) {
      for (const float smoothing : {0.0f, 0.1f}) {
        SCOPED_TRACE(std::to_string(value) + " " + std::to_string(softcap));
        Problem problem = RandomProblem({.shape = {60, 900, 40}});
        SetLogit(problem, 3, 800, value);
        SetLogit(problem, 4, 800, value);
        problem.labels[4] = 800;
        problem.options = {.logit_scale = 1.5f, .softcap = softcap, .label_smoothing = smoothing};
        ExpectAgreement(problem, {}, 1e-5);
        ExpectAgreement(problem, {.arithmetic = Arithmetic::kLibraryFloat32}, 1e-5);
        EXPECT_EQ(RunStep(problem).stats.rows_redone, softcap > 0 ? 0 : 2);
      }
    }
  }
}

TEST(LossOptions, EqualLogitsCostExactlyTheLogarithmOfTheVocabulary) {
  for (const float logit : {0.0f, 1.0f, -1.0f, 0x1p24f, -0x1p24f}) {
    Problem problem = RandomProblem({.shape = {3, 777, 4}});
    problem.weight = testing::Narrowed(DataType::kFloat32, std::vector<float>(777 * 4, 256.0f));
    problem.hidden_states = testing::Narrowed(DataType::kFloat32, std::vector<float>(12, logit / 1024));
    problem.options.label_smoothing = 0.25f;
    for (const float loss : RunStep(problem).losses) {
      EXPECT_EQ(loss, static_cast<float>(std::log(777.0))) << logit;
    }
  }
}

void ExpectSameRows(const StepResult& part, const StepResult& whole, int64_t first, const Shape& shape) {
  EXPECT_TRUE(SameBits(part.losses.data(), &whole.losses[first], shape.tokens));
  EXPECT_TRUE(SameBits(part.log_sum_exp.data(), &whole.log_sum_exp[first], shape.tokens));
  EXPECT_TRUE(SameBits(part.dx.data(), &whole.dx[first * shape.hidden], shape.tokens * shape.hidden));
}

TEST(LossOptions, RowsDoNotDependOnTheRowsBesideThem) {
  for (const Path& path : Paths()) {
    if (!path.same_rows) continue;
    for (const float softcap : {0.0f, 3.0f}) {
      Problem whole = RandomProblem({.shape = {200, 700, 70}, .type = path.type, .logit_deviation = 3.0});
      AllOptions().set(whole);
      whole.options.softcap = softcap;
      const StepResult expected = RunStep(whole, {.arithmetic = path.arithmetic});
      for (const int64_t count : {1, 2, 7, 16, 100, 199}) {
        for (const int64_t first : {int64_t{0}, 200 - count}) {
          SCOPED_TRACE(std::to_string(first) + " + " + std::to_string(count) + " " + Name(path.type));
          const Problem part = testing::PartOf(whole, first, count);
          ExpectSameRows(RunStep(part, {.arithmetic = path.arithmetic}), expected, first, part.shape);
        }
      }
      ExpectSameRows(RunStep(whole, {.arithmetic = path.arithmetic, .tile_rows = 60}), expected, 0,
                     whole.shape);
    }
  }
}

TEST(LossOptions, SameBitsOnAnyNumberOfThreads) {
#ifdef _OPENMP
  const int threads = omp_get_max_threads();
#endif
  for (const float softcap : {0.0f, 3.0f}) {
    Problem problem = RandomProblem({.shape = {70, 3000, 40}, .logit_deviation = 3.0});
    AllOptions().set(problem);
    problem.options.softcap = softcap;
    const StepResult expected = RunStep(problem);
    for (const int count : {1, 2, 3, 8}) {
#ifdef _OPENMP
      omp_set_num_threads(count);
#endif
      const StepResult result = RunStep(problem);
      ExpectSameRows(result, expected, 0, problem.shape);
      EXPECT_TRUE(SameBits(result.dw, expected.dw)) << count;
      EXPECT_TRUE(SameBits(result.db, expected.db)) << count;
    }
  }
#ifdef _OPENMP
  omp_set_num_threads(threads);
#endif
}

// Options at their defaults, arrays of ones and zeros: the plain loss, to the last bit.
TEST(LossOptions, NeutralValuesChangeNoBit) {
  const Problem plain = RandomProblem({.shape = {70, 700, 40}, .logit_deviation = 3.0});
  Problem neutral = plain;
  neutral.class_weights.assign(700, 1.0f);
  neutral.bias.assign(700, 0.0f);
  neutral.token_weights.assign(70, 1.0f);
  neutral.lse_gradients.assign(70, 0.0f);
  neutral.z_gradient_scale = 5.0f;
  const StepResult expected = RunStep(plain);
  const StepResult result = RunStep(neutral);
  ExpectSameRows(result, expected, 0, plain.shape);
  EXPECT_TRUE(SameBits(result.dw, expected.dw));
}

TEST(LossOptions, ALabelWhoseClassWeighsNothingCostsNothing) {
  Problem problem = RandomProblem({.shape = {3, 300, 40}});
  problem.class_weights.assign(300, 1.0f);
  problem.class_weights[problem.labels[1]] = 0.0f;
  const StepResult result = RunStep(problem);
  const std::vector<float> zeros(40, 0.0f);
  EXPECT_EQ(result.losses[1], 0.0f);
  EXPECT_TRUE(SameBits(&result.dx[40], zeros.data(), 40));
}

TEST(LossOptions, AnOverflowingRowIsNaNAloneAndNeverReachesDw) {
  for (const Path& path : Paths()) {
    for (const float softcap : {0.0f, 3.0f}) {
      SCOPED_TRACE(std::string(Name(path.type)) + " " + std::to_string(softcap));
      Problem problem = RandomProblem({.shape = {30, 300, 40}, .type = path.type});
      AllOptions().set(problem);
      problem.options.softcap = softcap;
      std::vector<float> x = problem.HiddenStates();
      for (int64_t h = 0; h < 40; ++h) x[7 * 40 + h] = 3e38f;  // infinite in fp16
      problem.hidden_type = DataType::kFloat32;
      problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
      const StepResult result = RunStep(problem, {.arithmetic = path.arithmetic});
      EXPECT_TRUE(std::isnan(result.losses[7]));
      EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.losses.data(), 30), 1);
      EXPECT_EQ(CountNonFinite(DataType::kFloat32, &result.dx[7 * 40], 40), 40);
      EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.dx.data(), 30 * 40), 40);
      Problem without = problem;
      without.labels[7] = kIgnored;
      const StepResult expected = RunStep(without, {.arithmetic = path.arithmetic});
      EXPECT_LT(RelativeError(result.dw, {expected.dw.begin(), expected.dw.end()}), 1e-6);
      EXPECT_LT(RelativeError(result.db, {expected.db.begin(), expected.db.end()}), 1e-6);
    }
  }
}

// λ, u and ω reach further than g: they too count where a gradient would leave the range.
TEST(LossOptions, HugeGradientsNeverMakeDwNaN) {
  for (const int of : {0, 1, 2}) {
    for (const float smoothing : {0.0f, 0.1f}) {
      Problem problem = RandomProblem({.shape = {60, 900, 40}});
      problem.options.label_smoothing = smoothing;
      if (of == 0) problem.options.lse_square_scale = 3e38f;
      if (of == 1) problem.lse_gradients.assign(60, 3e38f);
      if (of == 2) problem.entropy_gradients.assign(60, 3e38f);
      const StepResult result = RunStep(problem);
      EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.dw.data(), 900 * 40), 0);
      EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.losses.data(), 60), 60);
    }
  }
}

TEST(LossOptions, GradientsOfAnyScaleKeepTheirDigits) {
  for (const float scale : {1e-12f, 1e12f}) {
    Problem problem = RandomProblem({.shape = {60, 900, 40}, .logit_deviation = 3.0});
    problem.gradient_scale = scale;
    AllOptions().set(problem);
    ExpectAgreement(problem, {}, 1e-5);
    problem.options.softcap = 0;
    ExpectAgreement(problem, {}, 1e-5);
  }
}

TEST(LossOptions, OutOfRangeAreRejected) {
  const Problem problem = RandomProblem({.shape = {4, 30, 8}});
  std::vector<float> losses(4);
  std::vector<int32_t> tokens(4 * 65);
  std::vector<float> numbers(4 * 65);
  GuardedBytes workspace(WorkspaceBytes(4, 30, 8, DataType::kFloat32), 64);
  LinearCrossEntropyParams good = problem.Params();
  good.losses = losses.data();
  good.workspace = workspace.data();
  good.workspace_bytes = workspace.size();
  std::vector<float> bias(30);
  std::vector<float> dw(30 * 8);
  std::vector<float> db(30);
  good.bias = bias.data();
  good.weight_gradient = WeightGradient::kOverwrite;
  good.dw = dw.data();
  good.db = db.data();
  good.returns.top_k = 30;
  good.returns.top_tokens = tokens.data();
  good.returns.top_log_probabilities = numbers.data();
  ASSERT_EQ(CpuLinearCrossEntropy(good, nullptr), Status::kOk);
  using Change = void (*)(LinearCrossEntropyParams&);
  const Change changes[] = {
      [](auto& p) { p.options.logit_scale = 0.0f; },
      [](auto& p) { p.options.logit_scale = -1.0f; },
      [](auto& p) { p.options.logit_scale = std::numeric_limits<float>::infinity(); },
      [](auto& p) { p.options.logit_scale = std::nanf(""); },
      [](auto& p) { p.options.softcap = -1.0f; },
      [](auto& p) { p.options.softcap = std::nanf(""); },
      [](auto& p) { p.options.softcap = std::numeric_limits<float>::infinity(); },
      [](auto& p) { p.options.label_smoothing = -0.1f; },
      [](auto& p) { p.options.label_smoothing = 1.1f; },
      [](auto& p) { p.options.label_smoothing = std::nanf(""); },
      [](auto& p) { p.options.lse_square_scale = -1.0f; },
      [](auto& p) { p.options.lse_square_scale = std::numeric_limits<float>::infinity(); },
      [](auto& p) { p.options.lse_square_scale = std::nanf(""); },
      [](auto& p) { p.db = nullptr; },
      [](auto& p) { p.returns.top_k = -1; },
      [](auto& p) { p.returns.top_k = 31; },  // of 30 tokens
      [](auto& p) { p.returns.top_tokens = nullptr; },
      [](auto& p) { p.returns.top_log_probabilities = nullptr; },
  };
  for (size_t i = 0; i < std::size(changes); ++i) {
    LinearCrossEntropyParams bad = good;
    changes[i](bad);
    EXPECT_EQ(CpuLinearCrossEntropy(bad, nullptr), Status::kInvalidArgument) << i;
  }
}

}  // namespace
}  // namespace lossd::kernels::loss_options_test
