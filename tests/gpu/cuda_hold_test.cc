// Phase two of rows whose phase one was held: the bits that it has without. Names that begin with Small have
// shapes that compute-sanitizer gets through.
#include <algorithm>
#include <cmath>

#include "tests/gpu/cuda_step_fixture.h"

namespace lossd::kernels::cuda_hold_test {
namespace {

using testing::CudaOptions;
using testing::CudaOutcome;
using testing::kIgnoreIndex;
using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::RunCudaStep;
using testing::SameBits;
using testing::SetLogit;
using testing::Shape;

class CudaHoldTest : public ::testing::Test {};

std::vector<float> Factors(int64_t tokens, float first) {
  std::vector<float> factors(static_cast<size_t>(tokens));
  for (size_t i = 0; i < factors.size(); ++i) factors[i] = first + 0.01f * static_cast<float>(i % 37);
  return factors;
}

void SpreadEntropy(Problem& problem) { problem.entropy_gradients = Factors(problem.shape.tokens, -0.15f); }
void WeighTokens(Problem& problem) { problem.token_weights = Factors(problem.shape.tokens, 0.5f); }
// Two of five rows count.
void LeaveOut(Problem& problem) {
  WeighTokens(problem);
  const bool spread = !problem.entropy_gradients.empty();
  for (size_t i = 0; i < problem.token_weights.size(); ++i) {
    if (i % 5 < 3) problem.token_weights[i] = 0;
    if (i % 5 < 3 && spread) problem.entropy_gradients[i] = 0;
  }
}

struct Case {
  const char* name;
  void (*use)(Problem& problem);
};
constexpr Case kCases[] = {
    {"nothing", [](Problem&) {}},
    {"token weights", WeighTokens},
    {"rows left out", LeaveOut},
    {"label smoothing", [](Problem& problem) { problem.options.label_smoothing = 0.1f; }},
    {"z-loss", [](Problem& problem) { problem.options.lse_square_scale = 0.01f; }},
    {"softcap", [](Problem& problem) { problem.options.softcap = 3.0f; }},
    {"logit scale", [](Problem& problem) { problem.options.logit_scale = 0.37f; }},
    {"bias", [](Problem& problem) { problem.bias = Factors(problem.shape.vocab, -0.2f); }},
    {"entropies", SpreadEntropy},
    {"entropies and rows left out",
     [](Problem& problem) {
       SpreadEntropy(problem);
       LeaveOut(problem);
     }},
    {"entropies, bias and scale",
     [](Problem& problem) {
       SpreadEntropy(problem);
       problem.bias = Factors(problem.shape.vocab, -0.2f);
       problem.options.logit_scale = 1.7f;
     }},
    {"ignored rows",
     [](Problem& problem) {
       for (size_t i = 0; i < problem.labels.size(); i += 3) problem.labels[i] = kIgnoreIndex;
     }},
    {"rows out of an estimate's range",
     [](Problem& problem) {
       const int64_t rows = std::min(problem.shape.tokens, problem.shape.hidden);  // each takes a column
       for (int64_t row = 0; row < rows; row += 4) {
         SetLogit(problem, row, problem.shape.vocab - 1, 150.0f);
       }
     }},
    {"a row that overflows",
     [](Problem& problem) {
       SpreadEntropy(problem);
       std::fill_n(problem.hidden_states.begin(), SizeOf(problem.hidden_type), 0xFF);
     }},
};

void ExpectSame(const CudaOutcome& held, const CudaOutcome& plain) {
  ASSERT_EQ(held.error, "");
  ASSERT_EQ(plain.error, "");
  EXPECT_EQ(held.touched, "");
  EXPECT_TRUE(SameBits(held.losses, plain.losses)) << "losses";
  EXPECT_TRUE(SameBits(held.log_sum_exps, plain.log_sum_exps)) << "log-sum-exps";
  EXPECT_TRUE(SameBits(held.log_probabilities, plain.log_probabilities)) << "log-probabilities";
  EXPECT_TRUE(SameBits(held.dx, plain.dx)) << "dX";
  EXPECT_TRUE(SameBits(held.dw, plain.dw)) << "dW";
  EXPECT_TRUE(SameBits(held.db, plain.db)) << "db";
}

void Compare(const Shape& shape, DataType type, int64_t tile_rows) {
  for (const Case& one : kCases) {
    SCOPED_TRACE(one.name);
    Problem problem = RandomProblem({.shape = shape, .type = type, .logit_deviation = 2.0, .seed = 5});
    one.use(problem);
    CudaOptions options{.tile_rows = tile_rows, .skips_zeros = true};
    const CudaOutcome plain = RunCudaStep(problem, options);
    options.held = true;
    const CudaOutcome held = RunCudaStep(problem, options);
    ExpectSame(held, plain);
  }
}

TEST_F(CudaHoldTest, SmallHeldRowsHaveTheBitsOfRecomputedOnes) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    if (!testing::CanRun(cuda::Path::kHopper, type)) GTEST_SKIP() << "not a Hopper GPU";
    Compare({70, 391, 72}, type, 0);
  }
}

TEST_F(CudaHoldTest, HeldRowsHaveTheBitsOfRecomputedOnesInSeveralTiles) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    if (!testing::CanRun(cuda::Path::kHopper, type)) GTEST_SKIP() << "not a Hopper GPU";
    Compare({1500, 5003, 264}, type, 512);
    Compare({130, 1031, 64}, type, 130);
  }
}

TEST_F(CudaHoldTest, SmallOtherHiddenStatesThanThoseOfPhaseOneAreNotComputedSilently) {
  if (!testing::CanRun(cuda::Path::kHopper, DataType::kBFloat16)) GTEST_SKIP() << "not a Hopper GPU";
  const Problem problem = RandomProblem({.shape = {20, 391, 72}, .type = DataType::kBFloat16, .seed = 6});
  const CudaOutcome right = RunCudaStep(problem, {.held = true});
  const CudaOutcome wrong = RunCudaStep(problem, {.held = true, .changes_hidden_states = true});
  ASSERT_EQ(wrong.error, "");
  EXPECT_TRUE(std::isnan(wrong.losses[0]));
  for (size_t h = 0; h < 72; ++h) EXPECT_TRUE(std::isnan(wrong.dx[h]));
  for (const float value : wrong.dw) ASSERT_TRUE(std::isfinite(value));
  for (size_t i = 1; i < 20; ++i) EXPECT_EQ(wrong.losses[i], right.losses[i]);
}

// The error of E's rounding, and no more: 2^-9 of each probability in bf16.
TEST_F(CudaHoldTest, GradientsOfTheEntropyFromRoundedExponentialsAreClose) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    if (!testing::CanRun(cuda::Path::kHopper, type)) GTEST_SKIP() << "not a Hopper GPU";
    for (const double deviation : {0.05, 1.0, 6.0}) {
      Problem problem =
          RandomProblem({.shape = {40, 3001, 96}, .type = type, .logit_deviation = deviation, .seed = 9});
      problem.token_weights.assign(40, 0.0f);
      problem.entropy_gradients = Factors(40, 0.2f);
      const CudaOutcome outcome = RunCudaStep(problem, {.held = true});
      ASSERT_EQ(outcome.error, "");
      const Reference reference = testing::CpuResultsInFloat32(problem);
      const double dx = RelativeError(outcome.dx, reference.dx);
      const double dw = RelativeError(outcome.dw, reference.dw);
      std::printf("  %s, deviation %.2f: dX %.2e, dW %.2e\n", type == DataType::kBFloat16 ? "bf16" : "fp16",
                  deviation, dx, dw);
      RecordProperty("dx", std::to_string(dx));
      // Where logits hardly differ, s - mu is as small as the error of s.
      const double most = 1e-2 + (type == DataType::kBFloat16 ? 3e-3 : 4e-4) / deviation;
      EXPECT_LT(dx, most);
      EXPECT_LT(dw, most);
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::cuda_hold_test
