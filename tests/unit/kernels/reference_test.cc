// The oracle against finite differences and closed forms.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/unit/kernels/problem.h"

namespace lossd::kernels {
namespace {

using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RunReference;

double ScaledLoss(const Problem& problem) {
  double sum = 0;
  for (const double loss : RunReference(problem).losses) sum += problem.gradient_scale * loss;
  return sum;
}

// d loss / d value by central differences, with a step that fp32 holds exactly.
double Slope(const Problem& problem, std::vector<unsigned char> Problem::*tensor, int64_t index) {
  constexpr float kStep = 0x1p-10f;
  const auto loss_at = [&](float step) {
    Problem moved = problem;
    float value = 0;
    std::memcpy(&value, (moved.*tensor).data() + 4 * index, 4);
    value += step;
    std::memcpy((moved.*tensor).data() + 4 * index, &value, 4);
    return ScaledLoss(moved);
  };
  return (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
}

// Values with few bits, so that adding a step is exact.
void Coarsen(std::vector<unsigned char>& tensor) {
  for (size_t i = 0; i < tensor.size(); i += 4) {
    float value = 0;
    std::memcpy(&value, tensor.data() + i, 4);
    value = std::round(value * 256.0f) / 256.0f;
    std::memcpy(tensor.data() + i, &value, 4);
  }
}

TEST(Reference, GradientsAreTheSlopesOfTheLoss) {
  Problem problem = RandomProblem({.shape = {5, 11, 7}, .logit_deviation = 2.0});
  Coarsen(problem.weight);
  Coarsen(problem.hidden_states);
  problem.labels[2] = -100;
  problem.gradient_scale = 0.75f;
  const Reference reference = RunReference(problem);
  for (int64_t i = 0; i < 5 * 7; ++i) {
    EXPECT_NEAR(reference.dx[i], Slope(problem, &Problem::hidden_states, i), 1e-6) << i;
  }
  for (int64_t i = 0; i < 11 * 7; ++i) {
    EXPECT_NEAR(reference.dw[i], Slope(problem, &Problem::weight, i), 1e-6) << i;
  }
}

TEST(Reference, EqualLogitsCostTheLogarithmOfTheVocabulary) {
  Problem problem = RandomProblem({.shape = {3, 1000, 4}});
  problem.weight = testing::Narrowed(DataType::kFloat32, std::vector<float>(4000, 1.0f));
  for (const double loss : RunReference(problem).losses) EXPECT_NEAR(loss, std::log(1000.0), 1e-12);
}

TEST(Reference, IgnoredRowsAreZero) {
  Problem problem = RandomProblem({.shape = {3, 10, 4}});
  problem.labels.assign(3, -100);
  const Reference reference = RunReference(problem);
  for (const double value : reference.losses) EXPECT_EQ(value, 0.0);
  for (const double value : reference.dx) EXPECT_EQ(value, 0.0);
  for (const double value : reference.dw) EXPECT_EQ(value, 0.0);
}

TEST(Reference, ALossNearZeroKeepsItsDigits) {
  // Two entries, logits 40 and 0: loss log(1 + e^-40), gradient -e^-40 / (1 + e^-40).
  Problem problem;
  problem.shape = {1, 2, 1};
  problem.weight = testing::Narrowed(DataType::kFloat32, {40.0f, 0.0f});
  problem.hidden_states = testing::Narrowed(DataType::kFloat32, {1.0f});
  problem.labels = {0};
  const Reference reference = RunReference(problem);
  const double tail = std::exp(-40.0);
  EXPECT_NEAR(reference.losses[0] / tail, 1.0, 1e-12);
  EXPECT_NEAR(reference.dw[0] / -tail, 1.0, 1e-12);
}

}  // namespace
}  // namespace lossd::kernels
