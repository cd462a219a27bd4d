#include "client/examples/train_lm/trunk.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "client/examples/train_lm/random.h"

namespace lossd::train_lm::trunk_test {
namespace {

constexpr int64_t kHidden = 6;
const std::vector<int32_t> kText = {1, 1, 1, 1, 4, 7, 2, 9, 4, 4, 0, 8};
const std::vector<int64_t> kPositions = {4, 6, 7, 11, 9};

TrunkConfig SmallTrunk(double dropout) {
  return {.vocabulary = 10,
          .hidden = kHidden,
          .embedding = 5,
          .context = 2,
          .history = 4,
          .feature_dropout = dropout,
          .hidden_dropout = dropout,
          .seed = 3};
}

std::vector<float> Weights() {
  std::vector<float> weights(kPositions.size() * kHidden);
  Random random(5, 0);
  for (float& weight : weights) weight = static_cast<float>(random.Normal());
  return weights;
}

// A number that depends on every hidden state: their weighted sum. The first training Forward of a new trunk
// always draws the same dropout.
double WeightedSum(const TrunkConfig& config, size_t parameter, float change, ThreadPool* pool) {
  Trunk trunk(config, {}, pool);
  trunk.parameters()[parameter] += change;
  std::vector<float> hidden(kPositions.size() * kHidden);
  trunk.Forward(TrunkMode::kTraining, kText, kPositions, hidden);
  const std::vector<float> weights = Weights();
  return std::inner_product(hidden.begin(), hidden.end(), weights.begin(), 0.0);
}

void ExpectGradientsOfFiniteDifferences(const TrunkConfig& config) {
  ThreadPool pool(2);
  Trunk trunk(config, {}, &pool);
  std::vector<float> hidden(kPositions.size() * kHidden);
  trunk.Forward(TrunkMode::kTraining, kText, kPositions, hidden);
  trunk.Backward(kText, Weights());
  // Piecewise linear in each parameter, so that a difference is exact but for rounding and kinks of the relu,
  // which a small step avoids.
  constexpr float kStep = 1e-3f;
  for (size_t i = 0; i < trunk.gradients().size(); ++i) {
    const double up = WeightedSum(config, i, kStep, &pool);
    const double down = WeightedSum(config, i, -kStep, &pool);
    ASSERT_NEAR(trunk.gradients()[i], (up - down) / (2 * kStep), 5e-3) << "parameter " << i;
  }
}

TEST(Trunk, BackwardIsTheDerivativeOfForward) { ExpectGradientsOfFiniteDifferences(SmallTrunk(0)); }

TEST(Trunk, BackwardDropsWhatForwardDropped) { ExpectGradientsOfFiniteDifferences(SmallTrunk(0.4)); }

TEST(Trunk, DropsNothingInEvaluationAndSomethingInTraining) {
  ThreadPool pool(1);
  Trunk with(SmallTrunk(0.5), {}, &pool);
  Trunk without(SmallTrunk(0), {}, &pool);
  std::vector<float> one(kPositions.size() * kHidden);
  std::vector<float> two(one.size());
  with.Forward(TrunkMode::kEvaluation, kText, kPositions, one);
  without.Forward(TrunkMode::kEvaluation, kText, kPositions, two);
  EXPECT_EQ(one, two);
  with.Forward(TrunkMode::kTraining, kText, kPositions, one);
  EXPECT_NE(one, two);
  with.Forward(TrunkMode::kTraining, kText, kPositions, two);
  EXPECT_NE(one, two) << "every step draws anew";
}

TEST(Trunk, LastComponentIsAlwaysOne) {
  ThreadPool pool(1);
  Trunk trunk(SmallTrunk(0.5), {}, &pool);
  std::vector<float> hidden(kPositions.size() * kHidden);
  trunk.Forward(TrunkMode::kTraining, kText, kPositions, hidden);
  for (size_t row = 0; row < kPositions.size(); ++row) EXPECT_EQ(hidden[row * kHidden + kHidden - 1], 1);
}

TEST(Trunk, SeesItsHistoryAndNothingBeforeOrAfter) {
  ThreadPool pool(1);
  Trunk trunk(SmallTrunk(0), {}, &pool);
  const std::vector<int64_t> position = {9};
  std::vector<float> before(kHidden);
  trunk.Forward(TrunkMode::kEvaluation, kText, position, before);
  for (size_t changed = 0; changed < kText.size(); ++changed) {
    std::vector<int32_t> text = kText;
    text[changed] = (text[changed] + 1) % 10;
    std::vector<float> after(kHidden);
    trunk.Forward(TrunkMode::kEvaluation, text, position, after);
    EXPECT_EQ(before != after, changed >= 5 && changed < 9) << "token " << changed;
  }
}

}  // namespace
}  // namespace lossd::train_lm::trunk_test
