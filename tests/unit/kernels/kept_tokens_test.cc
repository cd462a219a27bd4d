// Rows whose softmax is over a list of tokens: the reference against what it is without lists, and the CPU's
// step against the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::kept_tokens_test {
namespace {

using testing::KeepTokens;
using testing::Problem;
using testing::RandomProblem;
using testing::RandomTeacher;
using testing::Reference;
using testing::RelativeError;
using testing::RunReference;
using testing::RunStep;
using testing::SameBits;
using testing::StepResult;

Problem Rows(DataType type = DataType::kFloat32) {
  Problem problem = RandomProblem({.shape = {40, 211, 70}, .type = type, .logit_deviation = 2.0});
  for (size_t r = 0; r < problem.labels.size(); r += 7) problem.labels[r] = -100;
  problem.entropy_gradients.assign(40, 0.25f);
  problem.bias.resize(211);
  for (size_t v = 0; v < 211; ++v) problem.bias[v] = static_cast<float>(v % 5) / 4;
  problem.options.lse_square_scale = 0.01f;
  return problem;
}

void ExpectNear(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-12) << i;
}

TEST(KeptTokensTest, AListOfTheWholeVocabularyChangesNothing) {
  const Problem plain = Rows();
  Problem kept = plain;
  KeepTokens(kept, 1.0);
  const Reference expected = RunReference(plain);
  const Reference reference = RunReference(kept);
  ExpectNear(reference.losses, expected.losses);
  ExpectNear(reference.entropy, expected.entropy);
  ExpectNear(reference.dx, expected.dx);
  ExpectNear(reference.dw, expected.dw);
  const StepResult step = RunStep(kept);
  ASSERT_EQ(step.status, Status::kOk);
  EXPECT_LT(RelativeError(step.losses, expected.losses), 1e-6);
  EXPECT_LT(RelativeError(step.dx, expected.dx), 1e-6);
  EXPECT_LT(RelativeError(step.dw, expected.dw), 1e-6);
  EXPECT_LT(RelativeError(step.db, expected.db), 1e-6);
}

TEST(KeptTokensTest, TokensOfNoListGetNoGradient) {
  Problem problem = Rows();
  KeepTokens(problem, 0.02);
  std::vector<bool> listed(211);
  for (size_t r = 0; r < problem.labels.size(); ++r) {
    if (problem.labels[r] == -100) continue;
    for (int64_t i = problem.kept_offsets[r]; i < problem.kept_offsets[r + 1]; ++i) {
      listed[static_cast<size_t>(problem.kept_tokens[static_cast<size_t>(i)])] = true;
    }
  }
  const StepResult step = RunStep(problem);
  ASSERT_EQ(step.status, Status::kOk);
  EXPECT_TRUE(step.intact);
  int64_t unlisted = 0;
  for (size_t v = 0; v < 211; ++v) {
    const double size = std::accumulate(step.dw.begin() + static_cast<std::ptrdiff_t>(70 * v),
                                        step.dw.begin() + static_cast<std::ptrdiff_t>(70 * (v + 1)), 0.0,
                                        [](double sum, float value) { return sum + std::fabs(value); });
    EXPECT_EQ(size != 0, listed[v]) << v;
    unlisted += listed[v] ? 0 : 1;
  }
  EXPECT_GT(unlisted, 0);
}

TEST(KeptTokensTest, TilesChangeNoBitOfARow) {
  for (const DataType type : kDataTypes) {
    Problem problem = Rows(type);
    KeepTokens(problem, 0.3);
    const StepResult whole = RunStep(problem, {.tile_rows = 4000, .top_k = 0});
    const StepResult tiles = RunStep(problem, {.tile_rows = 1, .top_k = 0});
    ASSERT_EQ(whole.status, Status::kOk);
    ASSERT_EQ(tiles.status, Status::kOk);
    EXPECT_TRUE(SameBits(whole.losses, tiles.losses));
    EXPECT_TRUE(SameBits(whole.entropy, tiles.entropy));
    EXPECT_TRUE(SameBits(whole.dx, tiles.dx));
    EXPECT_EQ(whole.stats.valid_tokens, 34);
    EXPECT_LT(RelativeError(tiles.dw, {whole.dw.begin(), whole.dw.end()}), 1e-6);
  }
}

TEST(KeptTokensTest, GradientsAreAddedToWhatIsThere) {
  Problem problem = Rows();
  KeepTokens(problem, 0.3);
  const StepResult first = RunStep(problem);
  const StepResult second = RunStep(
      problem,
      {.weight_gradient = WeightGradient::kAccumulate, .initial_dw = first.dw, .initial_db = first.db});
  for (size_t i = 0; i < first.dw.size(); ++i) ASSERT_EQ(second.dw[i], 2 * first.dw[i]) << i;
  for (size_t i = 0; i < first.db.size(); ++i) ASSERT_EQ(second.db[i], 2 * first.db[i]) << i;
}

TEST(KeptTokensTest, ARowThatOverflowsSaysSoAndLeavesDwAlone) {
  Problem problem = Rows();
  KeepTokens(problem, 0.3);
  Problem without = problem;
  without.labels[1] = -100;
  auto* states = reinterpret_cast<float*>(problem.hidden_states.data());
  for (int h = 0; h < 70; ++h) states[70 + h] = 3e38f;
  const StepResult step = RunStep(problem, {.top_k = 0});
  const StepResult expected = RunStep(without);
  EXPECT_TRUE(std::isnan(step.losses[1]));
  EXPECT_TRUE(std::isnan(step.entropy[1]));
  EXPECT_EQ(step.prediction[1], -1);
  EXPECT_TRUE(std::isnan(step.dx[70]));
  EXPECT_TRUE(SameBits(step.dw, expected.dw));
}

TEST(KeptTokensTest, WhatHasNoMeaningWithListsIsRefused) {
  Problem problem = Rows();
  KeepTokens(problem, 0.3);
  Problem smoothed = problem;
  smoothed.options.label_smoothing = 0.1f;
  EXPECT_EQ(RunStep(smoothed).status, Status::kUnsupported);
  Problem taught = problem;
  taught.teacher = RandomTeacher(problem.shape, {});
  EXPECT_EQ(RunStep(taught).status, Status::kUnsupported);
  EXPECT_EQ(RunStep(problem, {.top_k = 3}).status, Status::kUnsupported);
  EXPECT_EQ(RunStep(problem, {.top_k = 0}).status, Status::kOk);
}

}  // namespace
}  // namespace lossd::kernels::kept_tokens_test
