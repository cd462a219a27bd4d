// Soft targets of another head of the device, on their way through its batches: against the oracle, and the
// same however they are cut and whatever comes between.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::engine::testing::teaching_test {
namespace {

using kernels::Divergence;
using kernels::testing::kDivergences;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;
using kernels::testing::SoftProblem;
using kernels::testing::UseWithSoftTargets;

// The relative error of losses and divergences: fp32's, some operations on, with the cancellation in a
// divergence.
constexpr double kRowError = 1e-4;

Problem Taught(DataType type, Divergence divergence) {
  Problem problem = SoftProblem({37, 311, 45}, type, divergence);
  for (const size_t row : {0, 7, 8, 36}) problem.labels[row] = kIgnoreIndex;
  return problem;
}

Problem Plain(const Problem& taught) {
  Problem plain = taught;
  plain.teacher.reset();
  return plain;
}

class Teaching : public HeadTest {
 protected:
  // A problem's two heads, ready for batches.
  struct Heads {
    Heads(Device* device, const Problem& of)
        : problem(of), teacher(device, TeacherConfigOf(of)), student(device, of) {
      teacher.Publish(of.teacher->weight);
      kind = KindOf(of);
      kind.returns = {.log_sum_exp = true, .divergence = true};
      kind.teacher = teacher.AsTeacher(of, student);
    }
    std::vector<ChunkOutput> Run(std::vector<ChunkInput> chunks) {
      return student.Run(kind, std::move(chunks));
    }
    ChunkOutput RunWhole() { return Run({RowsOf(problem, 0, problem.shape.tokens)}).front(); }

    const Problem problem;
    HeadUnderTest teacher;
    HeadUnderTest student;
    BatchKey kind;
  };

  // The gradient's own relative error, of terms that may be a little larger than their sum.
  double Tolerance() const { return 2 * GradientTolerance(); }
};

INSTANTIATE_TEST_SUITE_P(All, Teaching, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Teaching, AgreesWithTheReferenceForEveryDivergenceAndOtherOption) {
  for (const Divergence divergence : kDivergences) {
    for (const int options : {0, 1, 2, 4, 8, 16, 32, 64, kernels::testing::kAllSoftOptions}) {
      SCOPED_TRACE("divergence " + std::to_string(static_cast<int>(divergence)) + ", options " +
                   std::to_string(options));
      Problem problem = Taught(type(), divergence);
      UseWithSoftTargets(problem, options);
      const Reference reference = Expected(problem);
      Heads heads(device_.get(), problem);
      const ChunkOutput output = heads.RunWhole();
      EXPECT_LT(RelativeError(output.losses, reference.losses), RowTolerance(kRowError));
      EXPECT_LT(RelativeError(output.returns.divergence, reference.divergence), RowTolerance(kRowError));
      EXPECT_LT(RelativeError(output.returns.log_sum_exp, reference.log_sum_exp), RowTolerance(kRowError));
      EXPECT_LT(RelativeError(output.dx, reference.dx), Tolerance());
      EXPECT_LT(RelativeError(heads.student.Gradient(), reference.dw), Tolerance());
      EXPECT_EQ(output.returns.divergence[7], 0.0f) << "ignored";
    }
  }
}

TEST_P(Teaching, ATeacherMayHaveAnyTypeAndWidth) {
  for (const DataType teacher_type : kTypes) {
    if (!HasHeadsOf(teacher_type)) continue;
    for (const int64_t hidden : {1, 8, 61, 200}) {
      SCOPED_TRACE(std::string(kernels::Name(teacher_type)) + ", " + std::to_string(hidden));
      Problem problem = Taught(type(), Divergence::kForwardKl);
      problem.teacher = RandomTeacher(problem.shape, {.hidden = hidden, .type = teacher_type});
      const Reference reference = Expected(problem);
      Heads heads(device_.get(), problem);
      const ChunkOutput output = heads.RunWhole();
      EXPECT_LT(RelativeError(output.losses, reference.losses), RowTolerance(kRowError));
      EXPECT_LT(RelativeError(output.dx, reference.dx), Tolerance());
      EXPECT_LT(RelativeError(heads.student.Gradient(), reference.dw), Tolerance());
    }
  }
}

TEST_P(Teaching, ChunksOfABatchHaveTheBitsOfOneChunk) {
  Heads heads(device_.get(), Taught(type(), Divergence::kJensenShannon));
  const ChunkOutput whole = heads.RunWhole();
  std::vector<ChunkInput> chunks;
  for (const auto& [first, count] : {std::pair(0, 1), {1, 7}, {8, 1}, {9, 28}}) {
    chunks.push_back(RowsOf(heads.problem, first, count));
  }
  ChunkOutput parts;
  const auto append = [](std::vector<float>& to, const std::vector<float>& values) {
    to.insert(to.end(), values.begin(), values.end());
  };
  for (const ChunkOutput& output : heads.Run(std::move(chunks))) {
    append(parts.losses, output.losses);
    append(parts.dx, output.dx);
    append(parts.returns.divergence, output.returns.divergence);
  }
  EXPECT_TRUE(SameBits(parts.losses, whole.losses));
  EXPECT_TRUE(SameBits(parts.dx, whole.dx));
  EXPECT_TRUE(SameBits(parts.returns.divergence, whole.returns.divergence));
}

// They share the workspace, and with label smoothing they leave different things beside dW.
TEST_P(Teaching, BatchesWithAndWithoutATeacherTakeTurns) {
  Problem problem = Taught(type(), Divergence::kReverseKl);
  problem.options.label_smoothing = 0.1f;
  problem.teacher->distillation.label_weight = 0.5f;
  Heads heads(device_.get(), problem);
  const ChunkOutput plain = heads.student.Run(Plain(problem));
  const ChunkOutput taught = heads.RunWhole();
  const ChunkOutput plain_again = heads.student.Run(Plain(problem));
  const ChunkOutput taught_again = heads.RunWhole();
  EXPECT_TRUE(SameBits(plain.losses, plain_again.losses));
  EXPECT_TRUE(SameBits(plain.dx, plain_again.dx));
  EXPECT_TRUE(SameBits(taught.losses, taught_again.losses));
  EXPECT_TRUE(SameBits(taught.dx, taught_again.dx));
  std::vector<double> dw = Expected(problem).dw;
  const std::vector<double> plain_dw = Expected(Plain(problem)).dw;
  for (size_t i = 0; i < dw.size(); ++i) dw[i] = 2 * (dw[i] + plain_dw[i]);
  EXPECT_LT(RelativeError(heads.student.Gradient(), dw), Tolerance());
}

TEST_P(Teaching, LossesAloneAddNothingAndHaveTheSameBits) {
  Heads heads(device_.get(), Taught(type(), Divergence::kForwardKl));
  heads.kind.mode = ComputeMode::kLossOnly;
  const ChunkOutput losses = heads.RunWhole();
  for (const float element : heads.student.Gradient()) ASSERT_EQ(element, 0.0f);
  heads.kind.mode = ComputeMode::kLossAndGradients;
  const ChunkOutput all = heads.RunWhole();
  EXPECT_TRUE(SameBits(losses.losses, all.losses));
  EXPECT_TRUE(SameBits(losses.returns.divergence, all.returns.divergence));
}

TEST_P(Teaching, WithoutDxLossesAndDwHaveTheBitsOfTheWholeStep) {
  Heads whole(device_.get(), Taught(type(), Divergence::kForwardKl));
  const ChunkOutput all = whole.RunWhole();
  Heads heads(device_.get(), Taught(type(), Divergence::kForwardKl));
  heads.kind.mode = ComputeMode::kLossAndWeightGradient;
  const ChunkOutput output = heads.RunWhole();
  EXPECT_TRUE(SameBits(output.losses, all.losses));
  EXPECT_TRUE(SameBits(output.returns.divergence, all.returns.divergence));
  EXPECT_TRUE(output.dx.empty());
  EXPECT_TRUE(SameBits(heads.student.Gradient(), whole.student.Gradient()));
}

TEST_P(Teaching, NewWeightsOfTheTeacherHoldForTheNextBatch) {
  Problem problem = Taught(type(), Divergence::kForwardKl);
  Heads heads(device_.get(), problem);
  const std::unique_ptr<BatchUnderWay> before =
      heads.student.Start(heads.kind, {RowsOf(problem, 0, problem.shape.tokens)});
  const Reference old_reference = Expected(problem);
  problem.teacher->weight =
      RandomTeacher(problem.shape,
                    {.hidden = problem.teacher->hidden, .type = problem.teacher->type, .seed = 5})
          .weight;
  heads.teacher.Publish(problem.teacher->weight);  // behind the batch that is under way
  const ChunkOutput after = heads.RunWhole();
  EXPECT_LT(RelativeError(before->Await().front().returns.divergence, old_reference.divergence),
            RowTolerance(kRowError));
  EXPECT_LT(RelativeError(after.returns.divergence, Expected(problem).divergence), RowTolerance(kRowError));
}

}  // namespace
}  // namespace lossd::engine::testing::teaching_test
