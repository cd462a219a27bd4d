// The part of dW that label smoothing keeps beside it: it belongs to the window like the rest.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing::cuda_smoothing_test {
namespace {

using kernels::testing::RandomProblem;
using kernels::testing::RelativeError;

constexpr int64_t kTokens = 150;
constexpr int64_t kVocab = 700;
constexpr int64_t kHidden = 123;

class CudaSmoothing : public HeadTest {
 protected:
  // Plain rows, smoothed ones, those with class weights, and both with softcap: all of one head.
  std::vector<Problem> Problems() const {
    Problem plain =
        RandomProblem({.shape = {kTokens, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0});
    Problem smoothed = plain;
    smoothed.options.label_smoothing = 0.2f;
    Problem weighted = smoothed;
    std::mt19937_64 random(1);
    std::uniform_real_distribution<float> weight(0.1f, 2.0f);
    for (int64_t v = 0; v < kVocab; ++v) weighted.class_weights.push_back(weight(random));
    Problem capped = weighted;
    capped.options.softcap = 3.0f;
    return {plain, smoothed, weighted, capped};
  }

  HeadConfig Config(const Problem& weighted) const {
    HeadConfig config{"h", kVocab, kHidden, type()};
    config.class_weights = std::make_shared<const std::vector<float>>(weighted.class_weights);
    return config;
  }

  static void Add(HeadUnderTest& head, const Problem& problem) {
    head.Run(KindOf(problem), {RowsOf(problem, 0, 40), RowsOf(problem, 40, kTokens - 40)});
  }

  // That the gradient is the sum of these problems'.
  void ExpectSum(HeadUnderTest& head, const std::vector<Problem>& added) const {
    std::vector<double> sum(static_cast<size_t>(kVocab * kHidden), 0.0);
    for (const Problem& problem : added) {
      const std::vector<double> dw = Expected(problem).dw;
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += dw[i];
    }
    EXPECT_LT(RelativeError(head.Gradient(), sum), GradientTolerance());
    constexpr int64_t kRow = 317;
    const std::vector<double> row(sum.begin() + kRow * kHidden, sum.begin() + (kRow + 1) * kHidden);
    EXPECT_LT(RelativeError(head.Gradient(kRow, 1), row), 4 * GradientError()) << "read alone";
  }
};

INSTANTIATE_TEST_SUITE_P(All, CudaSmoothing, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(CudaSmoothing, BatchesOfEveryKindAddUpInAnyOrder) {
  const std::vector<Problem> problems = Problems();
  const std::vector<std::vector<size_t>> orders = {{0, 1, 2, 3}, {2, 1, 0}, {1, 1, 3}, {2, 2}, {3, 0}, {1}};
  HeadUnderTest head(device_.get(), Config(problems[2]));
  head.Publish(problems[0].weight);
  for (const std::vector<size_t>& order : orders) {
    SCOPED_TRACE(::testing::PrintToString(order));
    std::vector<Problem> added;
    for (const size_t i : order) {
      Add(head, problems[i]);
      added.push_back(problems[i]);
    }
    ExpectSum(head, added);
    head.backend().ResetGradient();
    ExpectSum(head, {});
  }
}

TEST_P(CudaSmoothing, FollowsTheWeightsThatArePublished) {
  const std::vector<Problem> problems = Problems();
  HeadUnderTest head(device_.get(), Config(problems[2]));
  head.Publish(problems[0].weight);
  const Problem others =
      RandomProblem({.shape = {1, kVocab, kHidden}, .type = type(), .logit_deviation = 1.0, .seed = 9});
  for (const size_t i : {1, 2}) {
    Problem changed = problems[i];
    changed.weight = others.weight;
    head.Publish(changed.weight);
    const kernels::testing::Reference reference = Expected(changed);
    const ChunkOutput output = head.Run(KindOf(changed), {RowsOf(changed, 0, kTokens)}).front();
    EXPECT_LT(RelativeError(output.losses, reference.losses), RowTolerance(1e-5));
    EXPECT_LT(RelativeError(output.dx, reference.dx), GradientTolerance());
    head.Publish(problems[0].weight);
  }
}

TEST_P(CudaSmoothing, AFrozenHeadGivesTheSameRowsAndHoldsNoGradient) {
  const std::vector<Problem> problems = Problems();
  HeadUnderTest head(device_.get(), Config(problems[2]));
  HeadConfig config = Config(problems[2]);
  config.weight_gradients = WeightGradients::kFrozen;
  HeadUnderTest frozen(device_.get(), config);
  for (HeadUnderTest* one : {&head, &frozen}) one->Publish(problems[0].weight);
  for (const Problem& problem : problems) {
    const ChunkOutput expected = head.Run(KindOf(problem), {RowsOf(problem, 0, kTokens)}).front();
    const ChunkOutput output = frozen.Run(KindOf(problem), {RowsOf(problem, 0, kTokens)}).front();
    EXPECT_TRUE(kernels::testing::SameBits(output.losses, expected.losses));
    EXPECT_TRUE(kernels::testing::SameBits(output.dx, expected.dx));
  }
  ExpectSum(frozen, {});
  const MemoryPlan held = frozen.backend().MemoryReport();
  EXPECT_TRUE(std::none_of(held.begin(), held.end(),
                           [](const MemoryItem& item) { return item.purpose == "gradient"; }));
  EXPECT_LT(TotalBytes(held), TotalBytes(head.backend().MemoryReport()));
  EXPECT_EQ(TotalBytes(*device_->PlanMemory(config)), TotalBytes(held));
}

}  // namespace
}  // namespace lossd::engine::testing::cuda_smoothing_test
