// The optimizer's step on the CPU against torch.optim's formulas in fp64.
#include "kernels/optimizer.h"

#include <gtest/gtest.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/kernels/optimizer_reference.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::optimizer_test {
namespace {

using testing::GuardedBytes;
using testing::Narrowed;
using testing::NormalFloats;
using testing::OptimizersUnderTest;
using testing::ReferenceStep;
using testing::ReferenceTensor;
using testing::RelativeError;
using testing::SameBits;

constexpr int64_t kCount = 2311;  // blocks and lanes end in the middle

// A tensor with everything that any rule keeps.
struct Tensor {
  explicit Tensor(std::vector<float> weights)
      : weight(std::move(weights)), first(weight.size()), second(weight.size()) {}

  OptimizerTensor View(const std::vector<float>* gradient) {
    return {.count = static_cast<int64_t>(weight.size()),
            .gradient = gradient == nullptr ? nullptr : gradient->data(),
            .weight = weight.data(),
            .first_moment = first.data(),
            .second_moment = second.data()};
  }
  GradientTally Apply(const OptimizerArguments& arguments, const std::vector<float>* gradient) {
    return CpuApplyOptimizer(View(gradient), CoefficientsOf(arguments));
  }

  std::vector<float> weight;
  std::vector<float> first;
  std::vector<float> second;
};

std::vector<float> GradientAt(int64_t step, int64_t count = kCount) {
  return NormalFloats(count, 0.5, 1000 + static_cast<uint64_t>(step));
}

TEST(Optimizer, EveryRuleFollowsItsFormulaForAHundredSteps) {
  for (const auto& [name, arguments] : OptimizersUnderTest()) {
    SCOPED_TRACE(name);
    Tensor tensor(NormalFloats(kCount, 1.0, 1));
    ReferenceTensor reference{{tensor.weight.begin(), tensor.weight.end()}, {}, {}};
    OptimizerArguments step = arguments;
    for (step.step = 1; step.step <= 100; ++step.step) {
      const std::vector<float> gradient = GradientAt(step.step);
      tensor.Apply(step, &gradient);
      ReferenceStep(step, gradient, &reference);
    }
    // AdamW's 1 - lr weight_decay is a number of fp32, as it is for fp32 tensors of torch: up to 2^-25 off.
    const double decay = arguments.rule == OptimizerRule::kAdamW ? 100 * 0x1p-25 : 0;
    EXPECT_LT(RelativeError(tensor.weight, reference.weight), 1e-6 + decay);
    EXPECT_LT(RelativeError(tensor.first, reference.first), 1e-6);
    EXPECT_LT(RelativeError(tensor.second, reference.second), 1e-6);
  }
}

TEST(Optimizer, LearningRateAndMomentumMayChangeFromStepToStep) {
  Tensor tensor(NormalFloats(kCount, 1.0, 1));
  ReferenceTensor reference{{tensor.weight.begin(), tensor.weight.end()}, {}, {}};
  OptimizerArguments step{.rule = OptimizerRule::kSgd, .momentum = 0.9};
  for (step.step = 1; step.step <= 20; ++step.step) {
    step.learning_rate = 0.1 / static_cast<double>(step.step);
    step.momentum = step.step % 4 == 0 ? 0 : 0.9;  // 0: the buffer is left alone
    const std::vector<float> gradient = GradientAt(step.step);
    tensor.Apply(step, &gradient);
    ReferenceStep(step, gradient, &reference);
  }
  EXPECT_LT(RelativeError(tensor.weight, reference.weight), 1e-6);
}

TEST(Optimizer, AMasterIsWhatFp32WeightsWouldBeAndTheWeightItsRounding) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    for (const auto& [name, arguments] : OptimizersUnderTest()) {
      SCOPED_TRACE(name);
      Tensor wide(NormalFloats(kCount, 1.0, 1));
      Tensor with_master(wide.weight);
      std::vector<unsigned char> weight(static_cast<size_t>(kCount * SizeOf(type)));
      OptimizerArguments step = arguments;
      for (step.step = 1; step.step <= 5; ++step.step) {
        const std::vector<float> gradient = GradientAt(step.step);
        wide.Apply(step, &gradient);
        OptimizerTensor view = with_master.View(&gradient);
        view.master = with_master.weight.data();
        view.weight = weight.data();
        view.weight_type = type;
        CpuApplyOptimizer(view, CoefficientsOf(step));
      }
      EXPECT_TRUE(SameBits(with_master.weight, wide.weight));
      EXPECT_TRUE(weight == Narrowed(type, wide.weight));
    }
  }
}

TEST(Optimizer, SixteenBitWeightsWithoutAMasterAreRoundedOnceAStep) {
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    for (const auto& [name, arguments] : OptimizersUnderTest()) {
      SCOPED_TRACE(name);
      std::vector<unsigned char> weight = Narrowed(type, NormalFloats(kCount, 1.0, 1));
      Tensor narrow{std::vector<float>(kCount)};
      Tensor expected{std::vector<float>(kCount)};
      Convert(type, weight.data(), DataType::kFloat32, expected.weight.data(), kCount);
      OptimizerArguments step = arguments;
      for (step.step = 1; step.step <= 5; ++step.step) {
        const std::vector<float> gradient = GradientAt(step.step);
        OptimizerTensor view = narrow.View(&gradient);
        view.weight = weight.data();
        view.weight_type = type;
        CpuApplyOptimizer(view, CoefficientsOf(step));
        expected.Apply(step, &gradient);
        const std::vector<unsigned char> rounded = Narrowed(type, expected.weight);
        EXPECT_TRUE(weight == rounded);
        Convert(type, rounded.data(), DataType::kFloat32, expected.weight.data(), kCount);
      }
      EXPECT_TRUE(SameBits(narrow.first, expected.first));
    }
  }
}

// And nothing beside the tensors is touched, whatever their size.
TEST(Optimizer, AnElementDoesNotDependOnItsPlace) {
  constexpr int64_t kMost = 200003;
  const std::vector<float> weight = NormalFloats(kMost, 1.0, 1);
  const std::vector<float> gradient = GradientAt(1, kMost);
  const OptimizerArguments adamw{.rule = OptimizerRule::kAdamW, .learning_rate = 1e-3, .weight_decay = 0.1};
  Tensor whole(weight);
  whole.Apply(adamw, &gradient);
  for (const int64_t count : {1, 3, 8, 1023, 1024, 1025, 65535, 65537, 131073}) {
    SCOPED_TRACE(count);
    const int64_t first = kMost - count;
    GuardedBytes guarded_weight(count * 4, 64, 4);
    GuardedBytes guarded_first(count * 4, 64, 4);
    GuardedBytes guarded_second(count * 4, 64, 4);
    std::memcpy(guarded_weight.data(), &weight[static_cast<size_t>(first)], static_cast<size_t>(count) * 4);
    std::memset(guarded_first.data(), 0, static_cast<size_t>(count) * 4);
    std::memset(guarded_second.data(), 0, static_cast<size_t>(count) * 4);
    CpuApplyOptimizer({.count = count,
                       .gradient = &gradient[static_cast<size_t>(first)],
                       .weight = guarded_weight.data(),
                       .first_moment = guarded_first.As<float>(),
                       .second_moment = guarded_second.As<float>()},
                      CoefficientsOf(adamw));
    EXPECT_TRUE(SameBits(guarded_weight.As<float>(), &whole.weight[static_cast<size_t>(first)], count));
    EXPECT_TRUE(SameBits(guarded_second.As<float>(), &whole.second[static_cast<size_t>(first)], count));
    EXPECT_TRUE(guarded_weight.Intact() && guarded_first.Intact() && guarded_second.Intact());
  }
}

TEST(Optimizer, AnEmptyGradientCountsAsZeros) {
  const std::vector<float> zeros(kCount);
  for (const auto& [name, arguments] : OptimizersUnderTest()) {
    SCOPED_TRACE(name);
    Tensor empty(NormalFloats(kCount, 1.0, 1));
    Tensor of_zeros(empty.weight);
    OptimizerArguments step = arguments;
    for (step.step = 1; step.step <= 3; ++step.step) {
      const std::vector<float> gradient = GradientAt(1);
      const bool first = step.step == 1;
      const GradientTally tally = empty.Apply(step, first ? &gradient : nullptr);
      of_zeros.Apply(step, first ? &gradient : &zeros);
      if (!first) {
        EXPECT_EQ(tally.squares, 0);
      }
    }
    EXPECT_TRUE(SameBits(empty.weight, of_zeros.weight));
    EXPECT_TRUE(SameBits(empty.first, of_zeros.first));
  }
  Tensor decayed(std::vector<float>(kCount, 2.0f));
  decayed.Apply({.rule = OptimizerRule::kAdamW, .learning_rate = 0.5, .weight_decay = 0.5}, nullptr);
  EXPECT_TRUE(SameBits(decayed.weight, std::vector<float>(kCount, 1.5f)));
}

TEST(Optimizer, WhatIsNotFiniteIsCountedAndStaysWithItsElement) {
  std::vector<float> gradient = GradientAt(1);
  const OptimizerArguments adam{.rule = OptimizerRule::kAdam, .learning_rate = 1e-3};
  Tensor expected(NormalFloats(kCount, 1.0, 1));
  Tensor tensor(expected.weight);
  expected.Apply(adam, &gradient);
  gradient[3] = std::numeric_limits<float>::quiet_NaN();
  gradient[1024] = -std::numeric_limits<float>::infinity();
  gradient[kCount - 1] = std::numeric_limits<float>::infinity();
  gradient[77] = -1e30f;
  const GradientTally tally = tensor.Apply(adam, &gradient);
  EXPECT_EQ(tally.non_finite, 3);
  EXPECT_EQ(tally.largest, 1e30f);
  EXPECT_TRUE(std::isnan(tally.squares));
  for (size_t i = 0; i < kCount; ++i) {
    const bool own = i == 3 || i == 1024 || i == kCount - 1;
    EXPECT_EQ(std::isnan(tensor.weight[i]), own) << i;
    if (!own && i != 77) {
      EXPECT_EQ(tensor.weight[i], expected.weight[i]) << i;
    }
  }
}

TEST(Optimizer, TheTallyIsOfTheScaledGradient) {
  constexpr double kScale = -0.37;
  for (const int64_t count : {1, 7, 9, 1025, 70001, 200003}) {
    SCOPED_TRACE(count);
    const std::vector<float> gradient = GradientAt(1, count);
    double squares = 0;
    double largest = 0;
    for (const float value : gradient) {
      const double scaled = static_cast<double>(value) * kScale;
      squares += scaled * scaled;
      largest = std::max(largest, std::abs(scaled));
    }
    const GradientTally tally = CpuTallyGradient(gradient.data(), count, static_cast<float>(kScale));
    EXPECT_NEAR(tally.squares, squares, 1e-6 * squares);
    EXPECT_NEAR(tally.largest, largest, 1e-6 * largest);
    EXPECT_EQ(tally.non_finite, 0);
    Tensor tensor(gradient);
    const GradientTally of_step =
        tensor.Apply({.rule = OptimizerRule::kSgd, .gradient_scale = kScale}, &gradient);
    EXPECT_EQ(of_step.squares, tally.squares);
    EXPECT_EQ(of_step.largest, tally.largest);
  }
}

TEST(Optimizer, SquaresBeyondFp32AreSummed) {
  const std::vector<float> gradient = {1e25f, 1e-30f, 2e25f};
  const GradientTally tally = CpuTallyGradient(gradient.data(), 3, 1.0f);
  EXPECT_NEAR(std::sqrt(tally.squares), std::sqrt(5.0) * 1e25, 1e19);
  const GradientTally small = CpuTallyGradient(&gradient[1], 1, 1.0f);
  EXPECT_NEAR(std::sqrt(small.squares), 1e-30, 1e-36);
}

#ifdef _OPENMP
TEST(Optimizer, BitsDoNotDependOnTheNumberOfThreads) {
  constexpr int64_t kLarge = 500009;
  const std::vector<float> gradient = GradientAt(1, kLarge);
  const OptimizerArguments adamw{.rule = OptimizerRule::kAdamW, .learning_rate = 1e-3};
  const int threads = omp_get_max_threads();
  Tensor expected(NormalFloats(kLarge, 1.0, 1));
  const std::vector<float> start = expected.weight;
  omp_set_num_threads(1);
  const GradientTally of_one = expected.Apply(adamw, &gradient);
  for (const int count : {2, 3, 8}) {
    omp_set_num_threads(count);
    Tensor tensor(start);
    const GradientTally tally = tensor.Apply(adamw, &gradient);
    EXPECT_TRUE(SameBits(tensor.weight, expected.weight));
    EXPECT_EQ(tally.squares, of_one.squares);
  }
  omp_set_num_threads(threads);
}
#endif

TEST(Optimizer, GradientsAreAdded) {
  constexpr int64_t kLarge = 100003;
  const std::vector<float> from = NormalFloats(kLarge, 1.0, 1);
  std::vector<float> sum = NormalFloats(kLarge, 1.0, 2);
  std::vector<float> expected = sum;
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += from[i];
  CpuAddGradient(from.data(), kLarge, WeightGradient::kAccumulate, sum.data());
  EXPECT_TRUE(SameBits(sum, expected));
  sum.assign(kLarge, std::numeric_limits<float>::quiet_NaN());
  CpuAddGradient(from.data(), kLarge, WeightGradient::kOverwrite, sum.data());
  EXPECT_TRUE(SameBits(sum, from));
  const float minus_zero = -0.0f;
  CpuAddGradient(&minus_zero, 1, WeightGradient::kOverwrite, sum.data());
  EXPECT_FALSE(std::signbit(sum[0])) << "what is empty counts as zeros, and 0 - 0 is 0";
}

}  // namespace
}  // namespace lossd::kernels::optimizer_test
