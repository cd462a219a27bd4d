#include "client/examples/train_lm/local_head.h"

#include <gtest/gtest.h>

#include <cmath>

#include "client/examples/train_lm/random.h"

namespace lossd::train_lm::local_head_test {
namespace {

constexpr HeadShape kShape = {.vocabulary = 11, .hidden = 4};
constexpr float kScale = 0.25f;

std::vector<float> Values(int64_t count, uint64_t purpose) {
  std::vector<float> values(static_cast<size_t>(count));
  Random random(7, purpose);
  for (float& value : values) value = static_cast<float>(random.Normal());
  return values;
}

class LocalHeadTest : public ::testing::Test {
 protected:
  double LossOf(const std::vector<float>& weights, const std::vector<float>& hidden) {
    LocalHead head(kShape, HeadPrecision::kFloat32, {}, &pool_);
    EXPECT_TRUE(head.WriteWeights(weights).ok());
    return *head.Loss(labels_, hidden);
  }

  ThreadPool pool_{2};
  // More than one block of rows, the last one ragged.
  const std::vector<int64_t> labels_ = [] {
    std::vector<int64_t> labels;
    for (int64_t i = 0; i < 700; ++i) labels.push_back(i * i % kShape.vocabulary);
    return labels;
  }();
  const std::vector<float> weights_ = Values(kShape.Elements(), 1);
  const std::vector<float> hidden_ = Values(static_cast<int64_t>(labels_.size()) * kShape.hidden, 2);
};

TEST_F(LocalHeadTest, LossIsTheCrossEntropy) {
  double expected = 0;
  for (size_t row = 0; row < labels_.size(); ++row) {
    double sum = 0;
    double target = 0;
    for (int64_t v = 0; v < kShape.vocabulary; ++v) {
      double logit = 0;
      for (int64_t h = 0; h < kShape.hidden; ++h) {
        logit +=
            static_cast<double>(weights_[static_cast<size_t>(v * kShape.hidden + h)]) *
            static_cast<double>(hidden_[row * static_cast<size_t>(kShape.hidden) + static_cast<size_t>(h)]);
      }
      sum += std::exp(logit);
      if (v == labels_[row]) target = logit;
    }
    expected += std::log(sum) - target;
  }
  EXPECT_NEAR(LossOf(weights_, hidden_), expected, 1e-5 * expected);
}

TEST_F(LocalHeadTest, GradientsAreThoseOfTheScaledLoss) {
  LocalHead head(kShape, HeadPrecision::kFloat32, {}, &pool_);
  ASSERT_TRUE(head.WriteWeights(weights_).ok());
  std::vector<float> dx(hidden_.size());
  const absl::StatusOr<double> loss = head.LossAndGradients(labels_, hidden_, kScale, dx);
  ASSERT_TRUE(loss.ok());
  EXPECT_NEAR(*loss, LossOf(weights_, hidden_), 1e-9 * *loss);
  const std::vector<float> dw(head.gradient().begin(), head.gradient().end());

  constexpr float kStep = 1e-2f;
  for (size_t i = 0; i < dx.size(); i += 97) {
    std::vector<float> up = hidden_;
    std::vector<float> down = hidden_;
    up[i] += kStep;
    down[i] -= kStep;
    EXPECT_NEAR(dx[i], kScale * (LossOf(weights_, up) - LossOf(weights_, down)) / (2 * kStep), 2e-3)
        << "dx " << i;
  }
  for (size_t i = 0; i < dw.size(); ++i) {
    std::vector<float> up = weights_;
    std::vector<float> down = weights_;
    up[i] += kStep;
    down[i] -= kStep;
    const double slope = kScale * (LossOf(up, hidden_) - LossOf(down, hidden_)) / (2 * kStep);
    EXPECT_NEAR(dw[i], slope, 2e-2 + 1e-3 * std::abs(slope)) << "dw " << i;
  }
}

TEST_F(LocalHeadTest, AddsUpGradientsUntilAStepConsumesThem) {
  LocalHead head(kShape, HeadPrecision::kFloat32, {}, &pool_);
  ASSERT_TRUE(head.WriteWeights(weights_).ok());
  std::vector<float> dx(hidden_.size());
  ASSERT_TRUE(head.LossAndGradients(labels_, hidden_, kScale, dx).ok());
  const std::vector<float> once(head.gradient().begin(), head.gradient().end());
  ASSERT_TRUE(head.Step(/*learning_rate=*/0).ok());
  ASSERT_TRUE(head.LossAndGradients(labels_, hidden_, kScale, dx).ok());
  ASSERT_TRUE(head.LossAndGradients(labels_, hidden_, kScale, dx).ok());
  ASSERT_TRUE(head.Loss(labels_, hidden_).ok());
  for (size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(head.gradient()[i], 2 * once[i], 1e-4);
}

TEST_F(LocalHeadTest, AStepMovesTheMasterAndRoundsItAnew) {
  LocalHead head(kShape, HeadPrecision::kBFloat16, {}, &pool_);
  ASSERT_TRUE(head.WriteWeights(weights_).ok());
  std::vector<float> dx(hidden_.size());
  const double before = *head.LossAndGradients(labels_, hidden_, kScale, dx);
  // Each far below what a bf16 weight can hold, together a descent.
  for (int step = 0; step < 200; ++step) {
    ASSERT_TRUE(head.LossAndGradients(labels_, hidden_, kScale, dx).ok());
    ASSERT_TRUE(head.Step(/*learning_rate=*/1e-4).ok());
  }
  EXPECT_LT(*head.Loss(labels_, hidden_), 0.999 * before);
}

TEST_F(LocalHeadTest, RoundsToBFloat16LikeTheServer) {
  LocalHead head(kShape, HeadPrecision::kBFloat16, {}, &pool_);
  std::vector<float> weights = weights_;
  std::vector<float> hidden = hidden_;
  weights[0] = 1.00390625f;  // half way between two bf16 values: to the even one, 1
  ASSERT_TRUE(head.WriteWeights(weights).ok());
  const double rounded = *head.Loss(labels_, hidden);
  const double exact = LossOf(weights, hidden);
  EXPECT_NE(rounded, exact);
  EXPECT_NEAR(rounded, exact, 1e-2 * exact);
  weights[0] = 1.0f;
  ASSERT_TRUE(head.WriteWeights(weights).ok());
  EXPECT_EQ(*head.Loss(labels_, hidden), rounded);
}

}  // namespace
}  // namespace lossd::train_lm::local_head_test
