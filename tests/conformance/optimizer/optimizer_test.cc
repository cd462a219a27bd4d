// Steps of a head's optimizer: the same bits on every device, and everything that follows from the weights
// follows the new ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/optimizer/optimizer_fixture.h"

namespace lossd::engine::testing::optimizer_test {
namespace {

using kernels::OptimizerArguments;
using kernels::OptimizerRule;
using kernels::testing::Narrowed;
using kernels::testing::OptimizersUnderTest;
using kernels::testing::RandomProblem;
using kernels::testing::SameBits;
using ::testing::HasSubstr;

class Optimizer : public OptimizerTest {
 protected:
  static constexpr OptimizerArguments kAdamW = {
      .rule = OptimizerRule::kAdamW, .learning_rate = 1e-2, .weight_decay = 0.1};

  // The head's own gradient, with what the step tells.
  static GradientStats Apply(HeadUnderTest& head, const OptimizerArguments& arguments,
                             const engine::Gradient* gradient = nullptr) {
    const absl::StatusOr<GradientTallies> tallies =
        head.backend().ApplyStep(gradient, ArgumentsOf(arguments));
    EXPECT_TRUE(tallies.ok()) << tallies.status();
    return StatsOf(tallies.value_or(GradientTallies{}));
  }

  // A problem of this head's sizes, with class weights and every kind of label smoothing's terms.
  Problem MakeProblem(float smoothing) const {
    Problem problem = RandomProblem({.shape = {90, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0});
    problem.options.label_smoothing = smoothing;
    problem.bias.assign(kVocab, 0.25f);
    return problem;
  }
};

INSTANTIATE_TEST_SUITE_P(All, Optimizer, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Optimizer, EveryRuleHasTheSameBitsOnEveryDevice) {
  for (const auto& [name, arguments] : OptimizersUnderTest()) {
    for (const MasterWeights master : Masters()) {
      SCOPED_TRACE(name + (master == MasterWeights::kYes ? ", master" : ""));
      const HeadConfig config = ConfigOf(arguments, master, HeadBias::kYes);
      HeadUnderTest head(device_.get(), config);
      HeadValues values = RandomValues(config, 1);
      Publish(head, values);
      Expect(head, values);
      OptimizerArguments step = arguments;
      for (step.step = 1; step.step <= 4; ++step.step) {
        const GradientValues gradient = RandomGradient(config, 100 + static_cast<uint64_t>(step.step));
        Write(head, gradient);
        const GradientStats stats = Apply(head, step);
        ExpectStats(stats, Step(config, step, gradient, &values));
        head.backend().ResetGradient();
      }
      Expect(head, values);
    }
  }
}

// Rows that need no padding, and one that is nothing but padding.
TEST_P(Optimizer, EveryWidthHasTheSameBits) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{97, 1},    {97, 3},   {97, 4},    {97, 8},
                                                     {97, 1028}, {128, 64}, {50, 2048}, {2048, 16}};
  for (const auto& [vocab, hidden] : kShapes) {
    for (const MasterWeights master : Masters()) {
      SCOPED_TRACE(std::to_string(vocab) + " x " + std::to_string(hidden));
      HeadConfig config = ConfigOf(kAdamW, master, HeadBias::kYes);
      config.hidden_size = hidden;
      config.vocab_size = vocab;
      HeadUnderTest head(device_.get(), config);
      HeadValues values = RandomValues(config, 1);
      Publish(head, values);
      const GradientValues gradient = RandomGradient(config, 2);
      Write(head, gradient);
      const GradientStats stats = Apply(head, kAdamW);
      ExpectStats(stats, Step(config, kAdamW, gradient, &values));
      Expect(head, values);
    }
  }
}

TEST_P(Optimizer, AStepTakesWhatBatchesHaveAdded) {
  for (const float smoothing : {0.0f, 0.2f}) {
    Problem problem = MakeProblem(smoothing);
    Problem weighted = problem;
    for (int64_t v = 0; v < kVocab; ++v) weighted.class_weights.push_back(0.1f + 0.01f * (v % 17));
    HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kYes);
    config.class_weights = std::make_shared<const std::vector<float>>(weighted.class_weights);
    HeadUnderTest head(device_.get(), config);
    HeadValues values = RandomValues(config, 1);
    Publish(head, values);
    OptimizerArguments step = kAdamW;
    // Smoothing of one kind, of both kinds.
    for (step.step = 1; step.step <= 2; ++step.step) {
      head.Run(KindOf(problem), {RowsOf(problem, 0, 90)});
      if (step.step == 2) head.Run(KindOf(weighted), {RowsOf(weighted, 0, 50)});
      const GradientValues gradient = Read(head);
      const GradientStats summary = head.Stats();
      const GradientStats stats = Apply(head, step);
      EXPECT_EQ(stats.norm, summary.norm);
      EXPECT_EQ(stats.bias_norm, summary.bias_norm);
      ExpectStats(stats, Step(config, step, gradient, &values));
      Expect(head, values);
      head.backend().ResetGradient();
    }
  }
}

TEST_P(Optimizer, AfterAStepBatchesAreThoseOfAFreshHeadWithItsWeights) {
  for (const MasterWeights master : Masters()) {
    const HeadConfig config = ConfigOf(kAdamW, master, HeadBias::kYes);
    HeadUnderTest head(device_.get(), config);
    Publish(head, RandomValues(config, 1));
    for (const float smoothing : {0.2f, 0.0f}) {
      const Problem problem = MakeProblem(smoothing);
      head.Run(problem);  // whatever is kept of the old weights is there
      Apply(head, kAdamW);
      head.backend().ResetGradient();
      ExpectAsAFreshHead(head, problem);
    }
  }
}

// What overflows by the largest weight does so by the new one.
TEST_P(Optimizer, ARowOverflowsByTheNewWeights) {
  const OptimizerArguments sgd{.rule = OptimizerRule::kSgd, .learning_rate = 1.0};
  const HeadConfig config = ConfigOf(sgd, MasterWeights::kNo, HeadBias::kYes);
  HeadUnderTest head(device_.get(), config);
  Publish(head, RandomValues(config, 1));
  const Problem problem = MakeProblem(0);
  EXPECT_FALSE(std::isnan(head.Run(problem).losses[0]));
  GradientValues gradient = RandomGradient(config, 2);
  gradient.dw[200 * kHidden + 122] = std::numeric_limits<float>::infinity();
  Write(head, gradient);
  EXPECT_EQ(Apply(head, sgd).non_finite, 1);
  HeadUnderTest fresh(device_.get(), config);
  fresh.Publish(head.Weights(type(), 0, kVocab), head.Bias(0, kVocab));
  const ChunkOutput expected = fresh.Run(problem);
  EXPECT_TRUE(std::isnan(expected.losses[0]));
  EXPECT_TRUE(SameBits(head.Run(problem).losses, expected.losses));
}

TEST_P(Optimizer, AnEmptyGradientIsZerosAndIsNotRead) {
  for (const MasterWeights master : Masters()) {
    const HeadConfig config = ConfigOf(kAdamW, master, HeadBias::kYes);
    HeadUnderTest head(device_.get(), config);
    HeadValues values = RandomValues(config, 1);
    Publish(head, values);
    GradientValues junk = RandomGradient(config, 2);
    junk.dw.assign(junk.dw.size(), std::numeric_limits<float>::quiet_NaN());
    junk.db.assign(junk.db.size(), std::numeric_limits<float>::quiet_NaN());
    Write(head, junk);
    EXPECT_EQ(head.Stats().non_finite, kVocab * (kHidden + 1));
    head.backend().ResetGradient();
    ExpectStats(head.Stats(), GradientStats{});
    ExpectStats(Apply(head, kAdamW), GradientStats{});
    Step(config, kAdamW, {}, &values);
    Expect(head, values);
  }
}

TEST_P(Optimizer, WhatIsNotFiniteIsCountedWhereverItIs) {
  const HeadConfig config = ConfigOf(kAdamW, MasterWeights::kNo, HeadBias::kYes);
  HeadUnderTest head(device_.get(), config);
  Publish(head, RandomValues(config, 1));
  GradientValues gradient = RandomGradient(config, 2);
  gradient.dw.front() = std::numeric_limits<float>::quiet_NaN();
  gradient.dw[kHidden - 1] = std::numeric_limits<float>::infinity();
  gradient.dw.back() = -std::numeric_limits<float>::infinity();
  gradient.db.back() = std::numeric_limits<float>::quiet_NaN();
  gradient.dw[500] = -3e10f;
  Write(head, gradient);
  for (const double scale : {1.0, -0.5}) {
    const GradientStats stats = head.Stats(nullptr, scale);
    EXPECT_EQ(stats.non_finite, 4);
    EXPECT_EQ(stats.largest, 3e10f * static_cast<float>(std::abs(scale)));
    EXPECT_FALSE(std::isfinite(stats.norm));
    EXPECT_FALSE(std::isfinite(stats.bias_norm));
  }
}

TEST_P(Optimizer, TheSameStepsHaveTheSameBits) {
  const HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kYes);
  std::vector<GradientStats> first;
  std::vector<unsigned char> weights;
  for (int run = 0; run < 2; ++run) {
    HeadUnderTest head(device_.get(), config);
    Publish(head, RandomValues(config, 1));
    std::vector<GradientStats> told;
    OptimizerArguments step = kAdamW;
    for (step.step = 1; step.step <= 3; ++step.step) {
      Write(head, RandomGradient(config, 100 + static_cast<uint64_t>(step.step)));
      told.push_back(Apply(head, step));
    }
    if (run == 0) {
      first = told;
      weights = head.Weights(DataType::kFloat32, 0, kVocab);
      continue;
    }
    for (size_t i = 0; i < told.size(); ++i) EXPECT_EQ(told[i].norm, first[i].norm);
    EXPECT_TRUE(head.Weights(DataType::kFloat32, 0, kVocab) == weights);
  }
}

TEST_P(Optimizer, AStepMayTakeAnotherGradientThanTheHeadsOwn) {
  const HeadConfig config = ConfigOf(kAdamW, Masters().back(), HeadBias::kYes);
  HeadUnderTest head(device_.get(), config);
  HeadValues values = RandomValues(config, 1);
  Publish(head, values);
  const std::unique_ptr<engine::Gradient> other = head.CreateGradient();
  const GradientValues own = RandomGradient(config, 2);
  const GradientValues taken = RandomGradient(config, 4);
  Write(head, own);
  Write(head, taken, other.get());
  Apply(head, kAdamW, other.get());
  Step(config, kAdamW, taken, &values);
  Expect(head, values);
  EXPECT_TRUE(SameValues(Read(head), own));
  EXPECT_TRUE(SameValues(Read(head, other.get()), taken)) << "a step does not end its window";
}

TEST_P(Optimizer, MastersAreReadAsWrittenAndRoundedOnce) {
  if (type() == DataType::kFloat32) return;
  const HeadConfig config = ConfigOf(kAdamW, MasterWeights::kYes, HeadBias::kNo);
  HeadUnderTest head(device_.get(), config);
  const HeadValues values = RandomValues(config, 1);
  Publish(head, values);
  Expect(head, values);
  for (const DataType to : kTypes) {
    EXPECT_TRUE(head.Weights(to, 0, kVocab) == Narrowed(to, values.master)) << Name(to);
    const std::vector<float> row(values.master.end() - kHidden, values.master.end());
    EXPECT_TRUE(head.Weights(to, kVocab - 1, 1) == Narrowed(to, row)) << Name(to);
  }
}

TEST_P(Optimizer, AHeadWithoutItsOptimizerRefuses) {
  HeadUnderTest none(device_.get(), kVocab, kHidden, type());
  const absl::Status refused = none.backend().ApplyStep(nullptr, ArgumentsOf(kAdamW)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no optimizer of this kind"));
  OptimizerArguments sgd{.rule = OptimizerRule::kSgd, .learning_rate = 1.0};
  HeadUnderTest plain(device_.get(), ConfigOf(sgd, MasterWeights::kNo, HeadBias::kNo));
  sgd.momentum = 0.9;
  const absl::Status no_buffer = plain.backend().ApplyStep(nullptr, ArgumentsOf(sgd)).status();
  EXPECT_EQ(no_buffer.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(no_buffer.message()), HasSubstr("momentum is 0.9"));
}

TEST_P(Optimizer, WhatItTakesIsPlannedByPurpose) {
  for (const MasterWeights master : Masters()) {
    for (const bool two : {false, true}) {
      HeadConfig config = ConfigOf(kAdamW, master, HeadBias::kYes);
      config.double_buffer = two;
      HeadUnderTest head(device_.get(), config);
      Publish(head, RandomValues(config, 1));
      const absl::StatusOr<MemoryPlan> plan = device_->PlanMemory(config);
      ASSERT_TRUE(plan.ok()) << plan.status();
      MemoryPlan planned = *plan;
      std::erase_if(planned, [](const MemoryItem& item) { return item.purpose == "weight_staging"; });
      MemoryPlan held = head.backend().MemoryReport();
      ASSERT_EQ(held.size(), planned.size());
      for (size_t i = 0; i < held.size(); ++i) {
        if (two && held[i].purpose == "gradient") held[i].bytes += TotalBytes(device_->PlanGradient(config));
        EXPECT_EQ(held[i].purpose, planned[i].purpose);
        EXPECT_EQ(held[i].bytes, planned[i].bytes) << held[i].purpose;
        if (held[i].purpose == "optimizer") {
          EXPECT_GE(held[i].bytes, LeastPart(config.optimizer_bytes()));
        }
      }
      EXPECT_EQ(held.size(), master == MasterWeights::kYes ? 4U : 3U);
    }
  }
}

}  // namespace
}  // namespace lossd::engine::testing::optimizer_test
