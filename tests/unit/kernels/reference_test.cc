// The oracle against finite differences and closed forms.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/unit/kernels/option_cases.h"
#include "tests/unit/kernels/problem.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::reference_test {
namespace {

using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RunReference;

// What dX and dW are the gradients of.
double Objective(const Problem& problem) {
  const Reference reference = RunReference(problem);
  double sum = 0;
  for (size_t r = 0; r < problem.labels.size(); ++r) {
    const double z_loss = reference.z_loss[r];
    sum += problem.gradient_scale * (reference.losses[r] - z_loss);
    sum += problem.z_gradient_scale.value_or(problem.gradient_scale) * z_loss;
    if (!problem.lse_gradients.empty()) {
      sum += problem.gradient_scale * problem.lse_gradients[r] * reference.log_sum_exp[r];
    }
    if (!problem.entropy_gradients.empty()) {
      sum += problem.gradient_scale * problem.entropy_gradients[r] * reference.entropy[r];
    }
  }
  return sum;
}

// d loss / d value by central differences, with a step that fp32 holds exactly.
template <typename Element>
double Slope(const Problem& problem, std::vector<Element> Problem::*tensor, int64_t index) {
  constexpr float kStep = 0x1p-10f;
  const auto loss_at = [&](float step) {
    Problem moved = problem;
    auto* at = reinterpret_cast<unsigned char*>((moved.*tensor).data()) + 4 * index;
    float value = 0;
    std::memcpy(&value, at, 4);
    value += step;
    std::memcpy(at, &value, 4);
    return Objective(moved);
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

Problem SmallProblem() {
  Problem problem = RandomProblem({.shape = {5, 11, 7}, .logit_deviation = 2.0});
  Coarsen(problem.weight);
  Coarsen(problem.hidden_states);
  problem.labels[2] = -100;
  problem.gradient_scale = 0.75f;
  return problem;
}

void ExpectGradientsAreSlopes(const Problem& problem) {
  const Reference reference = RunReference(problem);
  for (int64_t i = 0; i < 5 * 7; ++i) {
    EXPECT_NEAR(reference.dx[i], Slope(problem, &Problem::hidden_states, i), 2e-6) << i;
  }
  for (int64_t i = 0; i < 11 * 7; ++i) {
    EXPECT_NEAR(reference.dw[i], Slope(problem, &Problem::weight, i), 2e-6) << i;
  }
  for (int64_t i = 0; i < std::ssize(problem.bias); ++i) {
    EXPECT_NEAR(reference.db[i], Slope(problem, &Problem::bias, i), 2e-6) << i;
  }
}

TEST(Reference, GradientsAreTheSlopesOfTheLoss) { ExpectGradientsAreSlopes(SmallProblem()); }

TEST(Reference, GradientsAreTheSlopesWithEveryPairOfOptions) {
  for (const testing::OptionCase& options : testing::OptionCases()) {
    SCOPED_TRACE(options.name);
    Problem problem = SmallProblem();
    options.set(problem);
    for (float& value : problem.bias) value = std::round(value * 256.0f) / 256.0f;
    ExpectGradientsAreSlopes(problem);
    if (HasFailure()) return;
  }
}

TEST(ReferenceTest, GradientsOverKeptTokensAreTheSlopesOfTheLoss) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    Problem problem = SmallProblem();
    KeepTokens(problem, 0.4, seed);
    problem.options.lse_square_scale = seed % 2 == 0 ? 0.25f : 0.0f;
    problem.options.softcap = seed % 3 == 0 ? 3.0f : 0.0f;
    problem.entropy_gradients = {-0.5, 2, 1, 0, 0.75};
    problem.lse_gradients = {0.5, 0, 1, -2, 1};
    problem.class_weights = {1, 2, 0, 0.5, 3, 1, 0.25, 0, 1, 1, 4};
    ExpectGradientsAreSlopes(problem);
    if (HasFailure()) return;
  }
}

TEST(ReferenceTest, GradientsOfTargetsOnListsAreTheSlopesOfTheLoss) {
  for (const int options : testing::SoftOptionPairs()) {
    SCOPED_TRACE(options);
    const auto has = [options](int bit) { return (options >> bit & 1) != 0; };
    Problem problem = SmallProblem();
    problem.targets = testing::RandomTargets(problem, 0.4, has(0) ? 1.0 : 0.7, options + 1);
    problem.targets->weight = 1.5f;
    if (has(1)) problem.targets->label_weight = 0.75f;
    if (has(2)) problem.options = {.logit_scale = 0.5f, .softcap = 3.0f};
    if (has(3)) problem.token_weights = {2, -1, 1, 0, 0.5};
    if (has(4)) {
      problem.lse_gradients = {0.5, 0, 1, -2, 1};
      problem.options.lse_square_scale = 0.125f;
    }
    if (has(5)) problem.class_weights = {1, 2, 0, 0.5, 3, 1, 0.25, 0, 1, 1, 4};
    if (has(6)) problem.entropy_gradients = {-0.5, 2, 1, 0, 0.75};
    ExpectGradientsAreSlopes(problem);
    if (HasFailure()) return;
  }
}

// Written out by hand: logits 2, 0 and 1, of which the list has the first two.
TEST(Reference, ADivergenceOfAListCountsAllOthersAsOne) {
  Problem problem;
  problem.shape = {1, 3, 1};
  problem.weight = testing::Narrowed(DataType::kFloat32, {2.0f, 0.0f, 1.0f});
  problem.hidden_states = testing::Narrowed(DataType::kFloat32, {1.0f});
  problem.labels = {2};
  problem.token_weights = {3.0f};
  problem.targets = {.offsets = {0, 2},
                     .tokens = {1, 0},
                     .probabilities = {0.25f, 0.5f},
                     .weight = 0.5f,
                     .label_weight = 0.125f};
  const double sum = std::exp(2.0) + 1 + std::exp(1.0);
  const double d = 0.5 * std::log(0.5 * sum / std::exp(2.0)) + 0.25 * std::log(0.25 * sum) +
                   0.25 * std::log(0.25 * sum / std::exp(1.0));
  const Reference reference = RunReference(problem);
  EXPECT_NEAR(reference.divergence[0], d, 1e-12);
  EXPECT_NEAR(reference.losses[0], 3.0 * (0.125 * (std::log(sum) - 1.0) + 0.5 * d), 1e-12);
}

using testing::kDivergences;

// The teacher's part of the loss, with other options beside it.
TEST(Reference, GradientsAreTheSlopesWithSoftTargets) {
  for (const Divergence divergence : kDivergences) {
    for (const int options : testing::SoftOptionPairs()) {
      SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + " " + std::to_string(options));
      const auto has = [options](int bit) { return (options >> bit & 1) != 0; };
      Problem problem = SmallProblem();
      problem.teacher = testing::RandomTeacher(
          problem.shape,
          {.hidden = 3, .logit_deviation = 1.5, .distillation = {.divergence = divergence, .weight = 1.5f}});
      if (has(0)) problem.teacher->distillation.temperature = 2.5f;
      if (has(1)) problem.teacher->distillation.label_weight = 0.75f;
      if (has(2)) problem.teacher->distillation.beta = 0.2f;
      if (has(3)) {
        problem.options = {.logit_scale = 0.5f, .softcap = 3.0f, .label_smoothing = 0.25f};
        problem.teacher->logit_scale = 0.75f;
        problem.teacher->softcap = 2.0f;
      }
      if (has(4)) problem.token_weights = {2, -1, 1, 0, 0.5};
      if (has(5)) {
        problem.lse_gradients = {0.5, 0, 1, -2, 1};
        problem.options.lse_square_scale = 0.125f;
        problem.class_weights = {1, 2, 0, 0.5, 3, 1, 0.25, 0, 1, 1, 4};
      }
      if (has(6)) problem.entropy_gradients = {-0.5, 2, 1, 0, 0.75};
      ExpectGradientsAreSlopes(problem);
      if (HasFailure()) return;
    }
  }
}

// Written out by hand: student's logits 2 and 0, teacher's 0 and 1, temperature 2.
TEST(Reference, DivergencesAreThoseOfTheFormulas) {
  Problem problem;
  problem.shape = {1, 2, 1};
  problem.weight = testing::Narrowed(DataType::kFloat32, {2.0f, 0.0f});
  problem.hidden_states = testing::Narrowed(DataType::kFloat32, {1.0f});
  problem.labels = {0};
  problem.token_weights = {3.0f};
  testing::TeacherProblem teacher;
  teacher.weight = testing::Narrowed(DataType::kFloat32, {0.0f, 0.5f});
  teacher.hidden_states = testing::Narrowed(DataType::kFloat32, {2.0f});
  const double q[] = {std::exp(1.0) / (std::exp(1.0) + 1), 1 / (std::exp(1.0) + 1)};
  const double p[] = {1 / (std::exp(0.5) + 1), std::exp(0.5) / (std::exp(0.5) + 1)};
  const auto relative_entropy = [](const double* a, const double* b) {
    return a[0] * std::log(a[0] / b[0]) + a[1] * std::log(a[1] / b[1]);
  };
  const double m[] = {0.25 * p[0] + 0.75 * q[0], 0.25 * p[1] + 0.75 * q[1]};
  const double expected[] = {relative_entropy(p, q), relative_entropy(q, p),
                             0.25 * relative_entropy(p, m) + 0.75 * relative_entropy(q, m)};
  const double surprise = std::log(std::exp(2.0) + 1.0) - 2.0;
  for (const Divergence divergence : kDivergences) {
    teacher.distillation = {
        .divergence = divergence, .beta = 0.25f, .temperature = 2.0f, .weight = 0.5f, .label_weight = 0.125f};
    problem.teacher = teacher;
    const Reference reference = RunReference(problem);
    const double d = expected[static_cast<int>(divergence)];
    EXPECT_NEAR(reference.divergence[0], d, 1e-12);
    EXPECT_NEAR(reference.losses[0], 3.0 * (0.125 * surprise + 0.5 * d), 1e-12);
    EXPECT_NEAR(reference.log_probability[0], -surprise, 1e-12);
  }
}

// Written out by hand for one row of two entries: logits 2 and 0, label 0.
TEST(Reference, TermsAreThoseOfTheFormulas) {
  Problem problem;
  problem.shape = {1, 2, 1};
  problem.weight = testing::Narrowed(DataType::kFloat32, {2.0f, 0.0f});
  problem.hidden_states = testing::Narrowed(DataType::kFloat32, {1.0f});
  problem.labels = {0};
  problem.options = {.label_smoothing = 0.5f, .lse_square_scale = 0.25f};
  problem.class_weights = {3.0f, 1.0f};
  problem.token_weights = {2.0f};
  const Reference reference = RunReference(problem);
  const double lse = std::log(std::exp(2.0) + 1.0);
  EXPECT_NEAR(reference.log_sum_exp[0], lse, 1e-12);
  EXPECT_NEAR(reference.log_probability[0], 2.0 - lse, 1e-12);
  EXPECT_NEAR(reference.z_loss[0], 2.0 * 0.25 * lse * lse, 1e-12);
  EXPECT_NEAR(reference.losses[0],
              2.0 * (0.5 * 3.0 * (lse - 2.0) + 0.25 * (3.0 * (lse - 2.0) + lse) + 0.25 * lse * lse), 1e-12);
  const double p = 1.0 / (1.0 + std::exp(-2.0));
  EXPECT_NEAR(reference.entropy[0], -p * std::log(p) - (1 - p) * std::log(1 - p), 1e-12);
}

TEST(Reference, SoftcapAndScaleShapeTheLogits) {
  Problem problem = RandomProblem({.shape = {2, 9, 3}});
  const std::vector<double> plain = RunReference(problem).logits;
  problem.options = {.logit_scale = 2.0f, .softcap = 1.5f};
  const std::vector<double> shaped = RunReference(problem).logits;
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_NEAR(shaped[i], 1.5 * std::tanh(2.0 * plain[i] / 1.5), 1e-12);
  }
}

TEST(Reference, TheBiasIsAddedBeforeScaleAndSoftcap) {
  Problem problem = RandomProblem({.shape = {2, 9, 3}});
  const std::vector<double> products = RunReference(problem).logits;
  problem.options = {.logit_scale = 2.0f, .softcap = 1.5f};
  problem.bias = {1, -2, 0.5, 0, 3, -0.25, 1, 1, -4};
  const std::vector<double> logits = RunReference(problem).logits;
  for (size_t i = 0; i < products.size(); ++i) {
    EXPECT_NEAR(logits[i], 1.5 * std::tanh(2.0 * (products[i] + problem.bias[i % 9]) / 1.5), 1e-12);
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
}  // namespace lossd::kernels::reference_test
