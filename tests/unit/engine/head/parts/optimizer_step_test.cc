#include "server/engine/head/parts/optimizer_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace lossd::engine::optimizer_step_test {
namespace {

using ::testing::HasSubstr;

HeadConfig HeadWith(OptimizerKind kind, double momentum = 0) {
  HeadConfig head;
  head.name = "h";
  head.optimizer.kind = kind;
  head.optimizer.momentum = momentum;
  return head;
}

void ExpectInvalid(const HeadConfig& head, const StepRequest& request, const std::string& text) {
  const absl::Status status = CheckStep(head, request);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

TEST(OptimizerStepTest, LimitsAreThoseOfTorch) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const HeadConfig adam = HeadWith(OptimizerKind::kAdam);
  const HeadConfig sgd = HeadWith(OptimizerKind::kSgd, 0.9);
  EXPECT_TRUE(CheckStep(adam, {}).ok()) << "a learning rate of 0 is one";
  ExpectInvalid(adam, {.learning_rate = -0.1}, "learning_rate is -0.1");
  ExpectInvalid(adam, {.learning_rate = std::nan("")}, "learning_rate is nan");
  ExpectInvalid(adam, {.learning_rate = kInfinity}, "learning_rate is inf");
  ExpectInvalid(adam, {.gradient_scale = kInfinity}, "gradient_scale is inf");
  EXPECT_TRUE(CheckStep(adam, {.gradient_scale = -1}).ok());
  ExpectInvalid(adam, {.weight_decay = -1.0}, "weight_decay is -1");
  ExpectInvalid(adam, {.beta1 = 1.0}, "beta1 is 1; it must be in [0, 1)");
  ExpectInvalid(adam, {.beta2 = -0.5}, "beta2 is -0.5");
  ExpectInvalid(sgd, {.momentum = kInfinity}, "momentum is inf");
  EXPECT_TRUE(CheckStep(sgd, {.momentum = 0.5}).ok());
}

TEST(OptimizerStepTest, ArgumentsOfAnotherOptimizerAreMistakes) {
  ExpectInvalid(HeadWith(OptimizerKind::kAdamW), {.momentum = 0.9},
                "momentum is set; it is an argument of SGD");
  ExpectInvalid(HeadWith(OptimizerKind::kSgd), {.beta1 = 0.9}, "beta1 is set");
  ExpectInvalid(HeadWith(OptimizerKind::kSgd), {.beta2 = 0.9}, "beta2 is set");
  ExpectInvalid(HeadWith(OptimizerKind::kSgd), {.momentum = 0.9}, "has no buffer for it");
  EXPECT_TRUE(CheckStep(HeadWith(OptimizerKind::kSgd), {.momentum = 0.0}).ok());
}

TEST(OptimizerStepTest, WhatIsUnsetIsTheHeads) {
  OptimizerConfig optimizer{.kind = OptimizerKind::kAdamW, .weight_decay = 0.1, .beta1 = 0.8, .beta2 = 0.95};
  const StepArguments same = Resolve(optimizer, {.learning_rate = 2, .gradient_scale = 3}, 7);
  EXPECT_EQ(same.optimizer, optimizer);
  EXPECT_EQ(same.learning_rate, 2);
  EXPECT_EQ(same.gradient_scale, 3);
  EXPECT_EQ(same.step, 7);
  const StepArguments other = Resolve(optimizer, {.weight_decay = 0.0, .beta1 = 0.5, .beta2 = 0.6}, 1);
  EXPECT_EQ(other.optimizer.weight_decay, 0);
  EXPECT_EQ(other.optimizer.beta1, 0.5);
  EXPECT_EQ(other.optimizer.beta2, 0.6);
  optimizer = {.kind = OptimizerKind::kSgd, .momentum = 0.9};
  EXPECT_EQ(Resolve(optimizer, {.momentum = 0.25}, 1).optimizer.momentum, 0.25);
}

}  // namespace
}  // namespace lossd::engine::optimizer_step_test
