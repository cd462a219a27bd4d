// What only heads with a bias have on the CUDA step: db by itself, and where the bias alone decides.
// Agreement with the CPU beside every other option: cuda_options_test.cc. Names that begin with Small have
// shapes that compute-sanitizer gets through.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/gpu/cuda_step_fixture.h"

namespace lossd::kernels::cuda_bias_test {
namespace {

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
using testing::Shape;

class CudaBias : public CudaStepTest {
 protected:
  static Problem WithBias(const Shape& shape) {
    Problem problem = RandomProblem({.shape = shape, .type = type(), .logit_deviation = 2.0});
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal(0.0f, 2.0f);
    problem.bias.resize(static_cast<size_t>(shape.vocab));
    std::ranges::generate(problem.bias, [&] { return normal(random); });
    return problem;
  }
};

// Vocabularies around the ends of tiles of 64, 192 and 256 columns, odd ones, and rows around those of tiles.
TEST_P(CudaBias, SmallShapesAgreeWithTheCpu) {
  for (const Shape& shape :
       {Shape{1, 1, 1}, Shape{3, 2, 9}, Shape{5, 63, 8}, Shape{64, 191, 24}, Shape{65, 193, 24},
        Shape{128, 255, 40}, Shape{129, 257, 40}, Shape{255, 129, 16}, Shape{257, 385, 16}}) {
    SCOPED_TRACE(Describe(shape));
    const Problem problem = WithBias(shape);
    ExpectClose(Run(problem, Options()), Expected(problem));
  }
}

TEST_P(CudaBias, LargerShapesAgreeWithTheCpu) {
  for (const Shape& shape : {Shape{1030, 2099, 72}, Shape{9, 50257, 123}, Shape{2050, 300, 64}}) {
    SCOPED_TRACE(Describe(shape));
    const Problem problem = WithBias(shape);
    ExpectClose(Run(problem, Options()), Expected(problem));
  }
}

// The products say nothing: a wrong place in b, in the sample as well, is seen undiminished.
TEST_P(CudaBias, SmallLogitsOfTheBiasAloneAgreeWithTheCpu) {
  for (const int64_t vocab : {127, 128, 300, 777, 5000}) {
    SCOPED_TRACE(vocab);
    Problem problem = WithBias({70, vocab, 16});
    std::ranges::fill(problem.hidden_states, 0);
    for (float& value : problem.bias) value *= 5;
    const Reference reference = Expected(problem);
    CudaOptions options = Options();
    options.whole_rows = true;
    options.top_k = 5;
    const CudaOutcome outcome = Run(problem, options);
    EXPECT_LT(RelativeError(outcome.losses, reference.losses), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.db, reference.db), 3 * Tolerance());
    const auto best = std::ranges::max_element(problem.bias) - problem.bias.begin();
    for (size_t r = 0; r < 70; ++r) {
      EXPECT_EQ(outcome.predictions[r], best);
      EXPECT_EQ(outcome.top_tokens[5 * r], best);
    }
  }
}

// Found as the true maximum, which is exactly one of the logits.
TEST_P(CudaBias, SmallEntryFarAboveTheSampleIsRedoneExactly) {
  for (const float value : {150.0f, 2e4f, 3e7f, 1e30f}) {
    for (const float scale : {1.0f, 0.37f}) {
      SCOPED_TRACE(std::to_string(value) + " " + std::to_string(scale));
      Problem problem = WithBias({60, 900, 40});
      problem.bias[333] = value;
      problem.options.logit_scale = scale;
      problem.labels[5] = 333;
      const Reference reference = Expected(problem);
      const CudaOutcome outcome = Run(problem, Options());
      EXPECT_LT(RelativeError(outcome.losses, reference.losses), kRowTolerance);
      EXPECT_LT(RelativeError(outcome.dx, reference.dx), Tolerance());
      ExpectWeightGradientsClose(outcome, reference);
    }
  }
}

TEST_P(CudaBias, SmallTheSameCallsGiveTheSameBits) {
  const Problem problem = WithBias({700, 1000, 40});
  const CudaOutcome first = Run(problem, Options());
  for (int i = 0; i < 5; ++i) {
    const CudaOutcome again = Run(problem, Options());
    EXPECT_TRUE(SameBits(again.losses, first.losses));
    EXPECT_TRUE(SameBits(again.dw, first.dw));
    EXPECT_TRUE(SameBits(again.db, first.db));
  }
}

TEST_P(CudaBias, SmallZerosForABiasChangeNothingButAddDb) {
  const Problem plain = RandomProblem({.shape = {140, 700, 96}, .type = type(), .logit_deviation = 2.0});
  Problem zeros = plain;
  zeros.bias.assign(700, 0.0f);
  const CudaOutcome expected = Run(plain, Options());
  const CudaOutcome outcome = Run(zeros, Options());
  EXPECT_TRUE(SameBits(outcome.losses, expected.losses));
  EXPECT_TRUE(SameBits(outcome.dx, expected.dx));
  EXPECT_TRUE(SameBits(outcome.dw, expected.dw));
  EXPECT_LT(RelativeError(outcome.db, Expected(zeros).db), 3 * Tolerance());
}

// All rows of one label, and none of most.
TEST_P(CudaBias, SmallManyRowsOfOneLabelAgreeWithTheCpu) {
  Problem problem = WithBias({300, 500, 24});
  std::ranges::fill(problem.labels, 499);
  problem.labels[7] = 0;
  problem.labels[8] = kIgnoreIndex;
  ExpectClose(Run(problem, Options()), Expected(problem));
}

// x is 0, so that dW is too; db is not.
TEST_P(CudaBias, SmallHugeGradientsOfRowsOfZerosNeverReachDb) {
  for (const float smoothing : {0.0f, 0.1f}) {
    Problem problem = WithBias({5, 300, 24});
    problem.options.label_smoothing = smoothing;
    problem.gradient_scale = 1e20f;
    problem.token_weights = {1, 1, 1e12f, 1, 1};
    const int64_t row_bytes = 24 * SizeOf(type());
    std::fill_n(problem.hidden_states.begin() + 2 * row_bytes, row_bytes, 0);
    const CudaOutcome outcome = Run(problem, Options());
    EXPECT_TRUE(std::isnan(outcome.losses[2])) << "the row says so";
    problem.labels[2] = kIgnoreIndex;
    const CudaOutcome without = Run(problem, Options());
    EXPECT_LT(RelativeError(outcome.db, {without.db.begin(), without.db.end()}), 1e-6);
  }
}

TEST_P(CudaBias, SmallABiasThatIsNotFiniteMakesRowsOverflowAndNoGradient) {
  for (const float value : {std::nanf(""), std::numeric_limits<float>::infinity(), 3e38f}) {
    Problem problem = WithBias({5, 300, 24});
    problem.bias[77] = value;
    const CudaOutcome outcome = Run(problem, Options());
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.losses.data(), 5), 5);
    EXPECT_TRUE(std::ranges::all_of(outcome.db, [](float gradient) { return gradient == 0; }));
    EXPECT_TRUE(std::ranges::all_of(outcome.dw, [](float gradient) { return gradient == 0; }));
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaBias, testing::EveryVariant(), testing::VariantName);

}  // namespace
}  // namespace lossd::kernels::cuda_bias_test
