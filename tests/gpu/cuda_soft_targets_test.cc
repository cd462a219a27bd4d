// Soft targets of the CUDA step, alone and with every other option, against the CPU. Names that begin with
// Small have shapes that compute-sanitizer gets through.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/soft_targets_closeness.h"
#include "tests/gpu/cuda_step_fixture.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::cuda_soft_targets_test {
namespace {

using testing::CudaOptions;
using testing::CudaOutcome;
using testing::CudaStepTest;
using testing::Describe;
using testing::Itself;
using testing::kDivergences;
using testing::kIgnoreIndex;
using testing::Nearly;
using testing::PartOf;
using testing::Problem;
using testing::RandomProblem;
using testing::RandomTeacher;
using testing::Reference;
using testing::RelativeError;
using testing::SameBits;
using testing::SetLogit;
using testing::SetTeacherLogit;
using testing::Shape;
using testing::SoftProblem;
using testing::UseWithSoftTargets;

std::string NameOf(Divergence divergence) {
  switch (divergence) {
    case Divergence::kForwardKl:
      return "KL(p, q)";
    case Divergence::kReverseKl:
      return "KL(q, p)";
    case Divergence::kJensenShannon:
      break;
  }
  return "JSD";
}

class CudaSoftTargets : public CudaStepTest {
 protected:
  static void ExpectSoft(const Problem& problem, const CudaOptions& options) {
    const Reference reference = Expected(problem);
    const CudaOutcome outcome = Run(problem, options);
    if (!outcome.error.empty()) return;
    EXPECT_LT(RelativeError(outcome.divergences, reference.divergence), 4e-5);
    EXPECT_LT(RelativeError(outcome.losses, reference.losses), 4e-5);
    EXPECT_LT(RelativeError(outcome.log_sum_exps, reference.log_sum_exp), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.z_losses, reference.z_loss), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.log_probabilities, reference.log_probability), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.dx, reference.dx), Tolerance());
    EXPECT_LT(RelativeError(outcome.dw, reference.dw), Tolerance());
  }
};

TEST_P(CudaSoftTargets, SmallShapesAgreeWithTheCpu) {
  for (const Divergence divergence : kDivergences) {
    for (const Shape& shape : {Shape{1, 1, 1}, Shape{1, 2, 3}, Shape{2, 3, 5}, Shape{7, 257, 33},
                               Shape{65, 511, 17}, Shape{129, 300, 40}}) {
      SCOPED_TRACE(NameOf(divergence) + " " + Describe(shape));
      ExpectSoft(SoftProblem(shape, type(), divergence), Options());
    }
  }
}

// More rows than logits are held of at once, more entries than a block's threads take at once.
TEST_P(CudaSoftTargets, LargerShapesAgreeWithTheCpu) {
  for (const Divergence divergence : kDivergences) {
    for (const Shape& shape : {Shape{300, 96, 300}, Shape{1100, 2099, 72}, Shape{40, 50257, 24}}) {
      SCOPED_TRACE(NameOf(divergence) + " " + Describe(shape));
      ExpectSoft(SoftProblem(shape, type(), divergence), Options());
    }
  }
}

TEST_P(CudaSoftTargets, SmallOptionsBesideThemAgreeWithTheCpu) {
  for (const Divergence divergence : kDivergences) {
    for (const int options : testing::SoftOptionPairs()) {
      SCOPED_TRACE(NameOf(divergence) + " " + std::to_string(options));
      Problem problem = SoftProblem({37, 530, 24}, type(), divergence);
      problem.labels[5] = kIgnoreIndex;
      UseWithSoftTargets(problem, options);
      ExpectSoft(problem, Options());
      if (HasFailure()) return;
    }
  }
}

// The teacher's dtype chooses the teacher's own path, and its product may be the library's.
TEST_P(CudaSoftTargets, SmallTeachersMayHaveAnyTypeAndPath) {
  for (const DataType teacher_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const cuda::Path path : {cuda::Path::kPortable, cuda::Path::kHopper}) {
      if (!testing::CanRun(path, teacher_type)) continue;
      SCOPED_TRACE(std::string(Name(teacher_type)) + (path == cuda::Path::kHopper ? " Hopper" : " portable"));
      Problem problem = SoftProblem({70, 600, 40}, type(), Divergence::kForwardKl);
      const Distillation distillation = problem.teacher->distillation;
      problem.teacher =
          RandomTeacher(problem.shape, {.hidden = 56, .type = teacher_type, .distillation = distillation});
      CudaOptions options = Options();
      options.teacher_path = path;
      ExpectSoft(problem, options);
    }
  }
}

TEST_P(CudaSoftTargets, SmallTilesAndIgnoredRowsAddUp) {
  for (const Divergence divergence : kDivergences) {
    SCOPED_TRACE(NameOf(divergence));
    Problem problem = SoftProblem({100, 500, 72}, type(), divergence);
    UseWithSoftTargets(problem, testing::kAllSoftOptions);
    for (size_t i = 0; i < 100; i += 9) problem.labels[i] = kIgnoreIndex;
    CudaOptions options = Options();
    options.tile_rows = 33;
    Reference reference = Expected(problem);
    EXPECT_LT(RelativeError(Run(problem, options).dw, reference.dw), Tolerance());
    options.weight_gradient = WeightGradient::kAccumulate;
    options.initial_dw.assign(500 * 72, 0.25f);
    for (double& value : reference.dw) value += 0.25;
    EXPECT_LT(RelativeError(Run(problem, options).dw, reference.dw), Tolerance());
    options.shares.assign(100, 0.0f);
    EXPECT_LT(RelativeError(Run(problem, options).dw, std::vector<double>(500 * 72, 0.25)), 1e-7);
  }
}

TEST_P(CudaSoftTargets, SmallTeacherThatIsTheHeadItselfGivesExactlyNothing) {
  for (const Divergence divergence : kDivergences) {
    for (const float temperature : {1.0f, 3.0f}) {
      for (const float softcap : {0.0f, 10.0f}) {
        SCOPED_TRACE(NameOf(divergence) + " " + std::to_string(temperature) + " " + std::to_string(softcap));
        Problem problem = RandomProblem({.shape = {90, 600, 40}, .type = type(), .logit_deviation = 3.0});
        problem.options.softcap = softcap;
        problem.teacher = Itself(problem, {.divergence = divergence, .temperature = temperature});
        CudaOptions options = Options();
        options.teacher_path = GetParam().path;
        const CudaOutcome outcome = Run(problem, options);
        const auto is_zero = [](float value) { return value == 0.0f; };
        EXPECT_TRUE(std::all_of(outcome.divergences.begin(), outcome.divergences.end(), is_zero));
        EXPECT_TRUE(std::all_of(outcome.losses.begin(), outcome.losses.end(), is_zero));
        EXPECT_TRUE(std::all_of(outcome.dx.begin(), outcome.dx.end(), is_zero));
        EXPECT_TRUE(std::all_of(outcome.dw.begin(), outcome.dw.end(), is_zero));
      }
    }
  }
}

// D is then of the order of the square of the difference, far below the rounding of log p and log q.
TEST_P(CudaSoftTargets, SmallDivergencesNearZeroKeepTheirDigits) {
  for (const Divergence divergence : kDivergences) {
    for (const float change : {1e-2f, 1e-3f}) {
      SCOPED_TRACE(NameOf(divergence) + " " + std::to_string(change));
      const Problem problem = Nearly({60, 800, 40}, type(), divergence, change);
      const Reference reference = Expected(problem);
      const CudaOutcome outcome = Run(problem, Options());
      const double tolerance = 6e-6 / static_cast<double>(change);
      EXPECT_LT(RelativeError(outcome.divergences, reference.divergence), tolerance);
      EXPECT_LT(RelativeError(outcome.dx, reference.dx), tolerance + Tolerance());
    }
  }
}

// One of them certain of what the other gives no probability that fp32 could hold.
TEST_P(CudaSoftTargets, SmallProbabilitiesThatUnderflowGiveTheDivergenceOfTheirLogits) {
  for (const Divergence divergence : kDivergences) {
    SCOPED_TRACE(NameOf(divergence));
    Problem problem = RandomProblem({.shape = {8, 300, 40}, .type = type()});
    problem.teacher = RandomTeacher(
        problem.shape, {.hidden = 40, .type = type(), .distillation = {.divergence = divergence}});
    for (int64_t row = 0; row < 8; ++row) {
      SetLogit(problem, row, row, 400.0f);
      SetTeacherLogit(problem, row, row + (row % 2), 500.0f);
    }
    const Reference reference = Expected(problem);
    const CudaOutcome outcome = Run(problem, Options());
    EXPECT_LT(RelativeError(outcome.divergences, reference.divergence), 4e-5);
    EXPECT_LT(RelativeError(outcome.dx, reference.dx), 5e-3);
  }
}

// Logits of 1e4: what is left of them is their own rounding.
TEST_P(CudaSoftTargets, SmallRowsOfLargeLogitsStayFinite) {
  for (const Divergence divergence : kDivergences) {
    SCOPED_TRACE(NameOf(divergence));
    Problem problem = RandomProblem({.shape = {30, 900, 40}, .type = type(), .logit_deviation = 3000.0});
    problem.teacher = RandomTeacher(problem.shape, {.hidden = 24,
                                                    .type = DataType::kBFloat16,
                                                    .logit_deviation = 3000.0,
                                                    .distillation = {.divergence = divergence}});
    const Reference reference = Expected(problem);
    const CudaOutcome outcome = Run(problem, Options());
    EXPECT_LT(RelativeError(outcome.divergences, reference.divergence), 2e-3);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.dx.data(), 30 * 40), 0);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.dw.data(), 900 * 40), 0);
  }
}

TEST_P(CudaSoftTargets, RowsDoNotDependOnTheRowsBesideThem) {
  constexpr int64_t kHidden = 72;
  for (const Divergence divergence : kDivergences) {
    SCOPED_TRACE(NameOf(divergence));
    Problem whole = SoftProblem({1040, 1500, kHidden}, type(), divergence);
    UseWithSoftTargets(whole, testing::kAllSoftOptions);
    CudaOptions options = Options();
    options.tile_rows = 1040;
    const CudaOutcome expected = Run(whole, options);
    const std::vector<std::pair<int64_t, int64_t>> parts = {{1000, 1}, {7, 64}, {450, 128}, {1, 519}};
    for (const auto& [first, count] : parts) {
      SCOPED_TRACE("rows " + std::to_string(first) + " + " + std::to_string(count));
      const CudaOutcome outcome = Run(PartOf(whole, first, count), options);
      const auto slice = [first = first, count = count](const auto& values, int64_t width) {
        return std::vector(values.begin() + first * width, values.begin() + (first + count) * width);
      };
      EXPECT_TRUE(SameBits(outcome.losses, slice(expected.losses, 1)));
      EXPECT_TRUE(SameBits(outcome.divergences, slice(expected.divergences, 1)));
      EXPECT_TRUE(SameBits(outcome.dx, slice(expected.dx, kHidden)));
    }
  }
}

TEST_P(CudaSoftTargets, SmallTwiceTheWeightIsTwiceTheLossAndTheGradient) {
  for (const Divergence divergence : kDivergences) {
    SCOPED_TRACE(NameOf(divergence));
    Problem problem = SoftProblem({60, 500, 24}, type(), divergence);
    const CudaOutcome once = Run(problem, Options());
    problem.teacher->distillation.weight *= 2;
    CudaOutcome twice = Run(problem, Options());
    for (std::vector<float>* values : {&twice.losses, &twice.dx, &twice.dw}) {
      for (float& value : *values) value /= 2;
    }
    EXPECT_TRUE(SameBits(once.losses, twice.losses));
    EXPECT_TRUE(SameBits(once.dx, twice.dx));
    EXPECT_TRUE(SameBits(once.dw, twice.dw));
  }
}

TEST_P(CudaSoftTargets, SmallLossesAloneAndWholeRowsAreTheSame) {
  for (const Divergence divergence : kDivergences) {
    SCOPED_TRACE(NameOf(divergence));
    const Problem problem = SoftProblem({60, 700, 40}, type(), divergence);
    const CudaOutcome all = Run(problem, Options());
    CudaOptions options = Options();
    options.dx_wanted = false;
    options.weight_gradient = WeightGradient::kNone;
    options.initial_dw.assign(700 * 40, 0.0f);
    const CudaOutcome losses = Run(problem, options);
    EXPECT_TRUE(SameBits(all.losses, losses.losses));
    EXPECT_TRUE(SameBits(all.divergences, losses.divergences));
    options = Options();
    options.whole_rows = true;
    options.top_k = 4;
    const CudaOutcome told = Run(problem, options);
    EXPECT_TRUE(SameBits(all.losses, told.losses));
    EXPECT_TRUE(SameBits(all.dx, told.dx));
    EXPECT_LT(RelativeError(told.entropies, Expected(problem).entropy), kRowTolerance);
  }
}

// The student's rows overflow, or the teacher's.
TEST_P(CudaSoftTargets, SmallRowsThatOverflowAreNaNAloneAndNeverReachDw) {
  for (const Divergence divergence : kDivergences) {
    SCOPED_TRACE(NameOf(divergence));
    Problem problem = SoftProblem({60, 900, 40}, type(), divergence);
    Problem expected = problem;
    expected.labels[7] = kIgnoreIndex;
    expected.labels[9] = kIgnoreIndex;
    std::vector<float> x = problem.HiddenStates();
    std::fill_n(&x[7 * 40], 40, 3.4e38f);  // infinite in 16 bits
    problem.hidden_type = DataType::kFloat32;
    problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
    testing::TeacherProblem& teacher = *problem.teacher;
    std::vector<float> infinite(11, std::numeric_limits<float>::infinity());
    const std::vector<unsigned char> narrow = testing::Narrowed(teacher.type, infinite);
    std::copy(narrow.begin(), narrow.end(), teacher.hidden_states.begin() + 9 * std::ssize(narrow));
    const CudaOutcome outcome = Run(problem, Options());
    for (const int row : {7, 9}) {
      EXPECT_TRUE(std::isnan(outcome.losses[static_cast<size_t>(row)])) << row;
      EXPECT_TRUE(std::isnan(outcome.divergences[static_cast<size_t>(row)])) << row;
      EXPECT_EQ(CountNonFinite(DataType::kFloat32, &outcome.dx[static_cast<size_t>(row) * 40], 40), 40)
          << row;
    }
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.losses.data(), 60), 2);
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.dx.data(), 60 * 40), 80);
    EXPECT_LT(RelativeError(outcome.dw, Expected(expected).dw), Tolerance());
  }
}

TEST_P(CudaSoftTargets, SmallBatchesWithHugeScalesNeverMakeDwNaN) {
  for (const Divergence divergence : kDivergences) {
    for (const float temperature : {1.0f, 1e-30f, 1e30f}) {
      SCOPED_TRACE(NameOf(divergence) + " " + std::to_string(temperature));
      Problem problem = SoftProblem({60, 900, 40}, type(), divergence);
      problem.gradient_scale = 3e38f;
      problem.teacher->distillation.temperature = temperature;
      const CudaOutcome outcome = Run(problem, Options());
      EXPECT_EQ(CountNonFinite(DataType::kFloat32, outcome.dw.data(), 900 * 40), 0);
    }
  }
}

TEST_P(CudaSoftTargets, AreAsCloseAsPlainArithmeticOrCloser) {
  engine::testing::ExpectSoftTargetsAreClose(type(), [](const Problem& problem) {
    const CudaOutcome outcome = Run(problem, Options());
    return engine::testing::SoftStepOutcome{outcome.losses, outcome.dx, outcome.dw};
  });
}

INSTANTIATE_TEST_SUITE_P(All, CudaSoftTargets, testing::EveryVariant(), testing::VariantName);

}  // namespace
}  // namespace lossd::kernels::cuda_soft_targets_test
