// Soft targets on lists where most of a row's probability is on its list, which the CPU's step has most
// digits for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::target_lists_test {
namespace {

using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::RunReference;
using testing::RunStep;
using testing::StepResult;

// Rows whose list of three tokens leaves e^-distance or so to the others.
Problem Rows(float distance) {
  Problem problem = RandomProblem({.shape = {6, 50, 16}});
  problem.targets.emplace();
  problem.targets->offsets = {0};
  std::vector<float> weight = problem.Weight();
  std::vector<float> x = problem.HiddenStates();
  for (int64_t r = 0; r < 6; ++r) {
    // A column of its own for each row.
    const int64_t column = 15 - r;
    for (int64_t v = 0; v < 50; ++v) weight[static_cast<size_t>(v * 16 + column)] = 0.0f;
    for (int64_t i = 0; i < 6; ++i) x[static_cast<size_t>(i * 16 + column)] = i == r ? 1.0f : 0.0f;
    for (int32_t i = 0; i < 3; ++i) {
      const auto token = static_cast<int32_t>(4 * r + i);
      weight[static_cast<size_t>(token * 16 + column)] = distance + 3.0f;
      problem.targets->tokens.push_back(token);
      problem.targets->probabilities.push_back(0.1f * static_cast<float>(i + 1));
    }
    problem.targets->offsets.push_back(std::ssize(problem.targets->tokens));
  }
  problem.weight = testing::Narrowed(DataType::kFloat32, weight);
  problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
  return problem;
}

TEST(TargetListsTest, OthersThatHaveNextToNothingAreStillDrawnToTheirShare) {
  for (const float distance : {6.0f, 9.0f, 12.0f, 15.0f}) {
    SCOPED_TRACE(distance);
    const Problem problem = Rows(distance);
    const Reference reference = RunReference(problem);
    const StepResult step = RunStep(problem, {.top_k = 0});
    ASSERT_EQ(step.status, Status::kOk);
    for (size_t r = 0; r < 6; ++r) {
      EXPECT_NEAR(step.divergence[r], reference.divergence[r], 0.02);
      EXPECT_GT(reference.divergence[r], 1.5) << "the others have 0.4 of the targets";
    }
    // A share of the others that is little more than rounding has some digits left.
    EXPECT_LT(RelativeError(step.dx, reference.dx), 0.02);
    EXPECT_LT(RelativeError(step.dw, reference.dw), 0.02);
  }
}

TEST(TargetListsTest, WhatRoundingLeavesOfOneIsNoTargetOfTheOthers) {
  Problem problem = Rows(12.0f);
  for (size_t i = 0; i < problem.targets->probabilities.size(); ++i) {
    problem.targets->probabilities[i] = i % 3 == 0 ? 1.0f - 0x1p-20f : 0.0f;
  }
  const Reference reference = RunReference(problem);
  Problem whole = problem;
  for (float& probability : whole.targets->probabilities) probability = std::round(probability);
  const Reference expected = RunReference(whole);
  for (size_t r = 0; r < 6; ++r) EXPECT_NEAR(reference.divergence[r], expected.divergence[r], 2e-5);
  EXPECT_LT(RelativeError(RunStep(problem).dx, reference.dx), 1e-4);
}

}  // namespace
}  // namespace lossd::kernels::target_lists_test
