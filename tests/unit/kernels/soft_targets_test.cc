// Soft targets of the CPU step against the fp64 reference, alone and with every other option.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/gemm.h"
#include "kernels/linear_cross_entropy.h"
#include "tests/unit/kernels/problem.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::soft_targets_test {
namespace {

using cpu::Arithmetic;
using testing::Describe;
using testing::Itself;
using testing::kDivergences;
using testing::Nearly;
using testing::Problem;
using testing::RandomProblem;
using testing::RandomTeacher;
using testing::Reference;
using testing::RelativeError;
using testing::RunReference;
using testing::RunStep;
using testing::SameBits;
using testing::SetLogit;
using testing::Shape;
using testing::SoftProblem;
using testing::StepOptions;
using testing::StepResult;
using testing::UseWithSoftTargets;

constexpr int64_t kIgnored = -100;

// Arithmetic and the type of head it takes.
struct Path {
  Arithmetic arithmetic;
  DataType type;
  double tolerance;  // of gradients
};

std::vector<Path> Paths() {
  std::vector<Path> paths = {{Arithmetic::kSimd, DataType::kFloat32, 1e-5},
                             {Arithmetic::kSimd, DataType::kBFloat16, 1e-5},
                             {Arithmetic::kSimd, DataType::kFloat16, 1e-5},
                             {Arithmetic::kLibraryFloat32, DataType::kFloat32, 1e-5}};
  if (cpu::HasFastBFloat16()) paths.push_back({Arithmetic::kLibraryBFloat16, DataType::kBFloat16, 6e-3});
  return paths;
}

void ExpectAgreement(const Problem& problem, const StepOptions& options, double tolerance) {
  const Reference reference = RunReference(problem);
  StepOptions all = options;
  all.top_k = 0;
  const StepResult result = RunStep(problem, all);
  ASSERT_EQ(result.status, Status::kOk);
  EXPECT_TRUE(result.intact);
  EXPECT_LT(RelativeError(result.divergence, reference.divergence), 2e-5);
  EXPECT_LT(RelativeError(result.losses, reference.losses), 2e-5);
  EXPECT_LT(RelativeError(result.log_sum_exp, reference.log_sum_exp), 1e-5);
  EXPECT_LT(RelativeError(result.dx, reference.dx), tolerance);
  EXPECT_LT(RelativeError(result.dw, reference.dw), tolerance);
}

TEST(SoftTargets, AgreeWithTheReferenceWithEveryOtherOption) {
  for (const Path& path : Paths()) {
    for (const Divergence divergence : kDivergences) {
      for (const int options : testing::SoftOptionPairs()) {
        SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + " " + std::to_string(options) + " " +
                     Name(path.type));
        Problem problem = SoftProblem({7, 530, 11}, path.type, divergence);
        problem.labels[5] = kIgnored;
        UseWithSoftTargets(problem, options);
        ExpectAgreement(problem, {.arithmetic = path.arithmetic}, path.tolerance);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(SoftTargets, AgreeInEveryShapeAndInSeveralTiles) {
  for (const Shape& shape : {Shape{1, 1, 1}, Shape{1, 2, 1}, Shape{2, 3, 5}, Shape{7, 257, 33},
                             Shape{130, 300, 40}, Shape{40, 5000, 70}}) {
    for (const Path& path : Paths()) {
      for (const Divergence divergence : kDivergences) {
        SCOPED_TRACE(Describe(shape) + " " + Name(path.type));
        const Problem problem = SoftProblem(shape, path.type, divergence);
        ExpectAgreement(problem, {.arithmetic = path.arithmetic}, path.tolerance);
        ExpectAgreement(problem, {.arithmetic = path.arithmetic, .tile_rows = 1}, path.tolerance);
        ExpectAgreement(problem, {.arithmetic = path.arithmetic, .tile_rows = 5}, path.tolerance);
      }
    }
  }
}

double Norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

// How far the values are from the expected ones, in units of `unit`.
double Distance(const std::vector<float>& actual, const std::vector<double>& expected, double unit) {
  return RelativeError(actual, expected) * Norm(expected) / unit;
}

// Where the head itself is certain, all gradients but those of KL(p ‖ q) vanish, and what is left of their
// terms is the rounding of logits: they are held to the size that gradients have, that of KL(p ‖ q).
TEST(SoftTargets, AgreeWhereDistributionsArePeakedNearUniformOrOfLargeLogits) {
  for (const double deviation : {0.01, 12.0, 1000.0}) {
    for (const Path& path : Paths()) {
      if (path.arithmetic == Arithmetic::kLibraryBFloat16) continue;
      Problem problem =
          RandomProblem({.shape = {20, 900, 24}, .type = path.type, .logit_deviation = deviation});
      problem.teacher = RandomTeacher(problem.shape, {.hidden = 31, .logit_deviation = deviation});
      const Reference forward = RunReference(problem);
      for (const Divergence divergence : kDivergences) {
        SCOPED_TRACE(std::to_string(deviation) + " " + std::to_string(static_cast<int>(divergence)) + " " +
                     Name(path.type));
        problem.teacher->distillation.divergence = divergence;
        const Reference reference = RunReference(problem);
        const StepResult result = RunStep(problem, {.arithmetic = path.arithmetic, .top_k = 0});
        const bool large = deviation > 100;
        const double tolerance = large ? 1e-3 : 1e-5;
        EXPECT_LT(RelativeError(result.divergence, reference.divergence), tolerance);
        EXPECT_LT(Distance(result.dx, reference.dx, Norm(large ? forward.dx : reference.dx)), tolerance);
        EXPECT_LT(Distance(result.dw, reference.dw, Norm(large ? forward.dw : reference.dw)), tolerance);
      }
    }
  }
}

TEST(SoftTargets, ATeacherThatIsTheHeadItselfGivesExactlyNothing) {
  for (const Path& path : Paths()) {
    if (path.arithmetic != cpu::BestArithmetic(path.type)) continue;  // the teacher's would be another
    for (const Divergence divergence : kDivergences) {
      for (const float temperature : {1.0f, 3.0f}) {
        Problem problem = RandomProblem({.shape = {9, 600, 33}, .type = path.type, .logit_deviation = 3.0});
        problem.options.softcap = 10.0f;
        problem.teacher = Itself(problem, {.divergence = divergence, .temperature = temperature});
        const StepResult result = RunStep(problem, {.arithmetic = path.arithmetic, .top_k = 0});
        for (const float value : result.divergence) EXPECT_EQ(value, 0.0f);
        for (const float value : result.losses) EXPECT_EQ(value, 0.0f);
        for (const float value : result.dx) EXPECT_EQ(value, 0.0f);
        for (const float value : result.dw) EXPECT_EQ(value, 0.0f);
      }
    }
  }
}

// D is then of the order of the square of the difference, far below the rounding of log p and log q.
TEST(SoftTargets, ADivergenceNearZeroKeepsItsDigits) {
  for (const Divergence divergence : kDivergences) {
    for (const float change : {1e-2f, 1e-3f, 1e-4f}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + " " + std::to_string(change));
      const Problem problem = Nearly({12, 800, 40}, DataType::kFloat32, divergence, change);
      const Reference reference = RunReference(problem);
      const StepResult result = RunStep(problem, {.top_k = 0});
      const double tolerance = 2e-6 / static_cast<double>(change);
      EXPECT_LT(RelativeError(result.divergence, reference.divergence), tolerance);
      EXPECT_LT(RelativeError(result.dx, reference.dx), tolerance);
    }
  }
}

// One of them certain of what the other gives no probability that fp32 could hold.
TEST(SoftTargets, ProbabilitiesThatUnderflowGiveTheDivergenceOfTheirLogits) {
  for (const Path& path : Paths()) {
    for (const Divergence divergence : kDivergences) {
      SCOPED_TRACE(std::string(Name(path.type)) + " " + std::to_string(static_cast<int>(divergence)));
      Problem problem = RandomProblem({.shape = {4, 300, 40}, .type = path.type});
      problem.teacher = RandomTeacher(
          problem.shape, {.hidden = 40, .type = path.type, .distillation = {.divergence = divergence}});
      for (int64_t row = 0; row < 4; ++row) {
        SetLogit(problem, row, row, 400.0f);
        testing::SetTeacherLogit(problem, row, row + (row % 2), 500.0f);
      }
      ExpectAgreement(problem, {.arithmetic = path.arithmetic}, 5e-3);
    }
  }
}

// In fp32 arithmetic a row's bits depend on the row alone.
TEST(SoftTargets, RowsDoNotDependOnTheRowsBesideThem) {
  for (const Divergence divergence : kDivergences) {
    Problem whole = SoftProblem({60, 900, 40}, DataType::kBFloat16, divergence);
    UseWithSoftTargets(whole, testing::kAllSoftOptions);
    const StepOptions options{.arithmetic = Arithmetic::kSimd, .top_k = 3};
    const StepResult expected = RunStep(whole, options);
    for (const int64_t rows : {1, 7, 30}) {
      for (int64_t first = 0; first + rows <= 60; first += 29) {
        const StepResult part = RunStep(testing::PartOf(whole, first, rows), options);
        EXPECT_TRUE(SameBits(part.losses.data(), &expected.losses[first], rows));
        EXPECT_TRUE(SameBits(part.divergence.data(), &expected.divergence[first], rows));
        EXPECT_TRUE(SameBits(part.dx.data(), &expected.dx[first * 40], rows * 40));
      }
    }
    StepOptions tiles = options;
    tiles.tile_rows = 13;
    const StepResult cut = RunStep(whole, tiles);
    EXPECT_TRUE(SameBits(cut.losses, expected.losses));
    EXPECT_TRUE(SameBits(cut.dx, expected.dx));
  }
}

TEST(SoftTargets, TwiceTheWeightIsTwiceTheLossAndTheGradient) {
  for (const Divergence divergence : kDivergences) {
    Problem problem = SoftProblem({20, 500, 24}, DataType::kFloat32, divergence);
    problem.teacher->distillation.label_weight = 0;
    const StepResult once = RunStep(problem);
    problem.teacher->distillation.weight *= 2;
    const StepResult twice = RunStep(problem);
    const auto expect_doubled = [](const std::vector<float>& from, const std::vector<float>& to) {
      for (size_t i = 0; i < from.size(); ++i) ASSERT_EQ(2 * from[i], to[i]);
    };
    expect_doubled(once.losses, twice.losses);
    expect_doubled(once.dx, twice.dx);
    expect_doubled(once.dw, twice.dw);
  }
}

// What is of softmax(s) is what it would be without a teacher, whatever the temperature.
TEST(SoftTargets, ReturnsAreThoseOfTheLossWithoutATeacher) {
  Problem problem = SoftProblem({15, 700, 33}, DataType::kFloat32, Divergence::kForwardKl);
  problem.teacher->distillation.temperature = 4.0f;
  problem.options.lse_square_scale = 0.01f;
  problem.labels[3] = kIgnored;
  const StepResult soft = RunStep(problem, {.top_k = 5});
  problem.teacher.reset();
  const StepResult plain = RunStep(problem, {.top_k = 5});
  EXPECT_TRUE(SameBits(soft.log_sum_exp, plain.log_sum_exp));
  EXPECT_TRUE(SameBits(soft.z_loss, plain.z_loss));
  EXPECT_TRUE(SameBits(soft.log_probability, plain.log_probability));
  EXPECT_TRUE(SameBits(soft.entropy, plain.entropy));
  EXPECT_TRUE(SameBits(soft.top_log_probabilities, plain.top_log_probabilities));
  EXPECT_EQ(soft.prediction, plain.prediction);
  EXPECT_EQ(soft.target_rank, plain.target_rank);
  EXPECT_EQ(soft.top_tokens, plain.top_tokens);
  EXPECT_EQ(soft.divergence[3], 0.0f);
  EXPECT_EQ(soft.losses[3], 0.0f);
}

TEST(SoftTargets, ATeachersLogitThatIsNotFiniteIsItsRowsAlone) {
  for (const Divergence divergence : kDivergences) {
    Problem problem = SoftProblem({6, 300, 20}, DataType::kFloat32, divergence);
    std::vector<float> states(6 * 11);
    Convert(DataType::kFloat32, problem.teacher->hidden_states.data(), DataType::kFloat32, states.data(),
            6 * 11);
    for (int64_t h = 0; h < 11; ++h) states[static_cast<size_t>(2 * 11 + h)] = 3e38f;
    problem.teacher->hidden_states = testing::Narrowed(DataType::kFloat32, states);
    const StepResult result = RunStep(problem, {.top_k = 0});
    Problem without = problem;
    without.labels[2] = kIgnored;
    const StepResult expected = RunStep(without, {.top_k = 0});
    EXPECT_TRUE(std::isnan(result.losses[2]));
    EXPECT_TRUE(std::isnan(result.divergence[2]));
    EXPECT_TRUE(std::isnan(result.dx[2 * 20]));
    EXPECT_TRUE(SameBits(&result.losses[3], &expected.losses[3], 3));
    EXPECT_LT(RelativeError(result.dw, std::vector<double>(expected.dw.begin(), expected.dw.end())), 1e-6);
  }
}

TEST(SoftTargets, WhatCannotBeIsRefused) {
  const Problem good = SoftProblem({3, 20, 4}, DataType::kFloat32, Divergence::kForwardKl);
  const auto status = [&](const auto& change) {
    Problem problem = good;
    change(*problem.teacher);
    return RunStep(problem).status;
  };
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  using testing::TeacherProblem;
  EXPECT_EQ(status([](TeacherProblem&) {}), Status::kOk);
  for (const float value : {0.0f, -1.0f, kNaN}) {
    EXPECT_EQ(status([=](TeacherProblem& t) { t.distillation.temperature = value; }),
              Status::kInvalidArgument);
    EXPECT_EQ(status([=](TeacherProblem& t) { t.logit_scale = value; }), Status::kInvalidArgument);
  }
  for (const float value : {-1.0f, kNaN}) {
    EXPECT_EQ(status([=](TeacherProblem& t) { t.distillation.weight = value; }), Status::kInvalidArgument);
    EXPECT_EQ(status([=](TeacherProblem& t) { t.distillation.label_weight = value; }),
              Status::kInvalidArgument);
    EXPECT_EQ(status([=](TeacherProblem& t) { t.softcap = value; }), Status::kInvalidArgument);
  }
  for (const float value : {0.0f, 1.0f, kNaN}) {
    EXPECT_EQ(status([=](TeacherProblem& t) { t.distillation.beta = value; }), Status::kInvalidArgument);
  }
}

TEST(SoftTargets, AWorkspaceForLessThanOneRowOfBothHeadsIsTooSmall) {
  const TeacherSize teacher{40, DataType::kBFloat16};
  const int64_t one = WorkspaceBytes(1, 5000, 30, DataType::kFloat32, teacher);
  EXPECT_GT(one, WorkspaceBytes(1, 5000, 30, DataType::kFloat32));
  EXPECT_EQ(RowsWithin(one, 5000, 30, DataType::kFloat32, teacher), 12);  // rows come in twelves
  EXPECT_EQ(RowsWithin(one - 1, 5000, 30, DataType::kFloat32, teacher), 0);

  const Problem problem = SoftProblem({3, 5000, 30}, DataType::kFloat32, Divergence::kForwardKl);
  const Teacher head = problem.teacher->Params();
  LinearCrossEntropyParams params = problem.Params();
  params.teacher = &head;
  std::vector<float> losses(3);
  params.losses = losses.data();
  const int64_t enough = WorkspaceBytes(1, 5000, 30, DataType::kFloat32, {head.hidden, head.weight_type});
  testing::GuardedBytes workspace(enough, 64);
  params.workspace = workspace.data();
  params.workspace_bytes = enough - 1;
  EXPECT_EQ(CpuLinearCrossEntropy(params, nullptr), Status::kWorkspaceTooSmall);
  params.workspace_bytes = enough;
  EXPECT_EQ(CpuLinearCrossEntropy(params, nullptr), Status::kOk);
  EXPECT_TRUE(workspace.Intact());
}

}  // namespace
}  // namespace lossd::kernels::soft_targets_test
