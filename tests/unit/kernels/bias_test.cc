// What only problems with a bias have: db by itself, and where the bias alone decides. Agreement with the
// reference beside every other option: loss_options_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/linear_cross_entropy.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::bias_test {
namespace {

using testing::GuardedBytes;
using testing::Problem;
using testing::RandomProblem;
using testing::RelativeError;
using testing::RunStep;
using testing::SameBits;
using testing::StepOptions;
using testing::StepResult;

constexpr int64_t kIgnored = -100;

// Values between -1 and 1 that repeat after a while.
float Pattern(int64_t i) { return static_cast<float>(i * 37 % 101) / 50.0f - 1.0f; }

void AddOptions(Problem& problem) {
  problem.options = {.logit_scale = 0.7f, .label_smoothing = 0.1f, .lse_square_scale = 0.01f};
  for (int64_t v = 0; v < problem.shape.vocab; ++v) {
    problem.bias.push_back(2 * Pattern(v + 11));
    problem.class_weights.push_back(std::fabs(Pattern(v + 3)));
  }
  for (int64_t r = 0; r < problem.shape.tokens; ++r) problem.token_weights.push_back(2 * Pattern(r));
}

// db is the column of dW that a column of ones in X has.
TEST(Bias, TheBiasIsAColumnOfWeightsForHiddenStatesOfOne) {
  for (const float softcap : {0.0f, 3.0f}) {
    Problem biased = RandomProblem({.shape = {70, 700, 40}, .logit_deviation = 2.0});
    AddOptions(biased);
    biased.options.softcap = softcap;
    Problem wide = biased;
    wide.bias.clear();
    wide.shape.hidden = 41;
    std::vector<float> weight = biased.Weight();
    std::vector<float> x = biased.HiddenStates();
    for (int64_t v = 699; v >= 0; --v) weight.insert(weight.begin() + 40 * (v + 1), biased.bias[v]);
    for (int64_t r = 69; r >= 0; --r) x.insert(x.begin() + 40 * (r + 1), 1.0f);
    wide.weight = testing::Narrowed(DataType::kFloat32, weight);
    wide.hidden_states = testing::Narrowed(DataType::kFloat32, x);
    const StepResult result = RunStep(biased);
    const StepResult expected = RunStep(wide);
    EXPECT_LT(RelativeError(result.losses, {expected.losses.begin(), expected.losses.end()}), 1e-6);
    std::vector<double> column(700);
    for (int64_t v = 0; v < 700; ++v) column[v] = expected.dw[v * 41 + 40];
    EXPECT_LT(RelativeError(result.db, column), 2e-6);
  }
}

TEST(Bias, TheGradientOfTheBiasIsOverwrittenAddedToOrLeftAlone) {
  Problem problem = RandomProblem({.shape = {6, 300, 40}});
  problem.bias.assign(300, 0.5f);
  const StepResult fresh = RunStep(problem);
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, fresh.db.data(), 300), 0) << "over NaN";
  const std::vector<float> before(300, 0.25f);
  const StepResult untouched =
      RunStep(problem, {.weight_gradient = WeightGradient::kNone, .initial_db = before});
  EXPECT_TRUE(SameBits(untouched.db, before));
  const StepOptions adding = {.weight_gradient = WeightGradient::kAccumulate,
                              .initial_dw = std::vector<float>(300 * 40),
                              .initial_db = before};
  const StepResult added = RunStep(problem, adding);
  for (size_t v = 0; v < 300; ++v) EXPECT_NEAR(added.db[v], 0.25 + fresh.db[v], 1e-7);
  problem.labels.assign(6, kIgnored);
  EXPECT_TRUE(SameBits(RunStep(problem).db, std::vector<float>(300))) << "no row: zeros over NaN";
  EXPECT_TRUE(SameBits(RunStep(problem, adding).db, before));
}

// The rows do without the head's bias: the first of a window may be such.
TEST(Bias, WithoutABiasItsGradientIsZeroOrLeftAlone) {
  Problem problem = RandomProblem({.shape = {6, 300, 40}});
  for (const WeightGradient gradient : {WeightGradient::kOverwrite, WeightGradient::kAccumulate}) {
    std::vector<float> db(300, 0.25f);
    std::vector<float> dw(300 * 40);
    std::vector<float> losses(6);
    GuardedBytes workspace(WorkspaceBytes(6, 300, 40, DataType::kFloat32), 64);
    LinearCrossEntropyParams params = problem.Params();
    params.losses = losses.data();
    params.weight_gradient = gradient;
    params.dw = dw.data();
    params.db = db.data();
    params.workspace = workspace.data();
    params.workspace_bytes = workspace.size();
    ASSERT_EQ(CpuLinearCrossEntropy(params, nullptr), Status::kOk);
    const float expected = gradient == WeightGradient::kOverwrite ? 0.0f : 0.25f;
    EXPECT_TRUE(SameBits(db, std::vector<float>(300, expected)));
  }
}

TEST(Bias, ABiasThatIsNotFiniteMakesRowsOverflowAndNoGradient) {
  for (const float value : {std::nanf(""), std::numeric_limits<float>::infinity(), 3e38f}) {
    Problem problem = RandomProblem({.shape = {5, 300, 24}});
    problem.bias.assign(300, 0.5f);
    problem.bias[77] = value;
    problem.options.logit_scale = 4.0f;
    const StepResult result = RunStep(problem);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, result.losses.data(), 5), 5);
    EXPECT_TRUE(SameBits(result.db, std::vector<float>(300)));
    EXPECT_TRUE(SameBits(result.dw, std::vector<float>(300 * 24)));
  }
}

}  // namespace
}  // namespace lossd::kernels::bias_test
