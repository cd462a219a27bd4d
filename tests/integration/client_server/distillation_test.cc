// Soft targets of another head through real gRPC, against the CPU's step, whose bits each row has; what
// becomes of batches whose teacher is written to, deleted, or never was there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_server/client_server_fixture.h"
#include "tests/unit/kernels/problem.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::distillation_test {
namespace {

using kernels::testing::kAllSoftOptions;
using kernels::testing::kDivergences;
using kernels::testing::Problem;
using kernels::testing::RandomTeacher;
using kernels::testing::RelativeError;
using kernels::testing::RunStep;
using kernels::testing::SameBits;
using kernels::testing::SoftProblem;
using kernels::testing::StepResult;
using kernels::testing::TeacherProblem;
using kernels::testing::UseWithSoftTargets;
using testing::ClientServerTest;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kVocab;

constexpr int64_t kTokens = 23;
constexpr int64_t kTeacherHidden = 11;
constexpr int64_t kChunkTokens = 5;
constexpr double kClose = 5e-6;
constexpr char kTeacher[] = "teacher";

// Three tokens are ignored.
Problem Taught(kernels::Divergence divergence = kernels::Divergence::kForwardKl) {
  Problem problem = SoftProblem({kTokens, kVocab, kHidden}, kernels::DataType::kFloat32, divergence);
  problem.labels[0] = problem.labels[11] = problem.labels[kTokens - 1] = -100;
  return problem;
}

Divergence OnClient(kernels::Divergence divergence) {
  switch (divergence) {
    case kernels::Divergence::kForwardKl:
      return Divergence::kForwardKl;
    case kernels::Divergence::kReverseKl:
      return Divergence::kReverseKl;
    case kernels::Divergence::kJensenShannon:
      return Divergence::kJensenShannon;
  }
  return Divergence::kForwardKl;
}

DataType OnClient(kernels::DataType type) {
  return type == kernels::DataType::kBFloat16 ? DataType::kBFloat16 : DataType::kFloat32;
}

// A batch with room for its results.
struct Results {
  explicit Results(const Problem& of) : problem(of), x(of.HiddenStates()) {}

  Batch batch() const {
    Batch batch{
        .labels = problem.labels, .hidden_states = x.data(), .gradient_scale = problem.gradient_scale};
    batch.loss = {.label_smoothing = problem.options.label_smoothing,
                  .lse_square_scale = problem.options.lse_square_scale,
                  .logit_scale = problem.options.logit_scale,
                  .softcap = problem.options.softcap};
    batch.token_weights = problem.token_weights;
    batch.lse_gradients = problem.lse_gradients;
    batch.entropy_gradients = problem.entropy_gradients;
    batch.z_gradient_scale = problem.z_gradient_scale;
    const TeacherProblem& teacher = *problem.teacher;
    batch.distillation = {.teacher = kTeacher,
                          .hidden_size = teacher.hidden,
                          .hidden_type = OnClient(teacher.type),
                          .hidden_states = teacher.hidden_states.data(),
                          .divergence = OnClient(teacher.distillation.divergence),
                          .beta = teacher.distillation.beta,
                          .temperature = teacher.distillation.temperature,
                          .weight = teacher.distillation.weight,
                          .label_weight = teacher.distillation.label_weight};
    return batch;
  }
  BatchOutputs outputs() {
    return {.losses = losses,
            .dx = dx.data(),
            .returns = {.log_sum_exp = log_sum_exp, .divergences = divergences}};
  }

  const Problem& problem;
  std::vector<float> x;
  std::vector<float> losses = std::vector<float>(kTokens);
  std::vector<float> dx = std::vector<float>(kTokens * kHidden);
  std::vector<float> log_sum_exp = losses;
  std::vector<float> divergences = losses;
};

std::vector<double> Wide(const std::vector<float>& values) { return {values.begin(), values.end()}; }
double Sum(const std::vector<float>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

class DistillationTest : public ClientServerTest {
 protected:
  // The problem's heads: the teacher with a scale and a cap of its own.
  void MakeTeacher(const Problem& problem) {
    const TeacherProblem& teacher = *problem.teacher;
    const auto head = client_->CreateHead({.name = kTeacher,
                                           .vocab_size = kVocab,
                                           .hidden_size = teacher.hidden,
                                           .weight_type = OnClient(teacher.type),
                                           .logit_scale = teacher.logit_scale,
                                           .softcap = teacher.softcap,
                                           .frozen = true});
    ASSERT_TRUE(head.ok()) << head.status();
    ASSERT_TRUE(head->WriteWeights(OnClient(teacher.type), teacher.weight.data()).ok());
  }
  Head MakeStudent(const Problem& problem) {
    const auto head = client_->CreateHead({.name = "student",
                                           .vocab_size = kVocab,
                                           .hidden_size = kHidden,
                                           .weight_type = DataType::kFloat32,
                                           .class_weights = problem.class_weights});
    EXPECT_TRUE(head.ok()) << head.status();
    EXPECT_TRUE(head->WriteWeights(DataType::kFloat32, problem.weight.data()).ok());
    return *head;
  }
  static Session OpenAt(const Head& head) {
    auto session = head.OpenSession({.chunk_bytes = kChunkTokens * (kHidden + kTeacherHidden) * 4});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }
  static std::vector<float> FlushOf(const Head& head, const Session& session) {
    std::vector<float> gradient(kVocab * kHidden);
    const std::vector<SessionMarks> marks = {session.marks()};
    const auto flushed = head.Flush({}, marks, gradient.data());
    EXPECT_TRUE(flushed.ok()) << flushed.status();
    return gradient;
  }
  void ExpectStep(const Problem& problem) {
    const StepResult wanted = RunStep(problem, {.top_k = 0});
    MakeTeacher(problem);
    const Head head = MakeStudent(problem);
    Session session = OpenAt(head);
    Results got(problem);
    const auto result = session.Compute(got.batch(), got.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_GE(result->chunks, 4);
    EXPECT_EQ(result->teacher_weight_version, 1U);
    EXPECT_TRUE(SameBits(got.losses, wanted.losses));
    EXPECT_TRUE(SameBits(got.dx, wanted.dx));
    EXPECT_TRUE(SameBits(got.log_sum_exp, wanted.log_sum_exp));
    EXPECT_TRUE(SameBits(got.divergences, wanted.divergence));
    EXPECT_LT(RelativeError(FlushOf(head, session), Wide(wanted.dw)), kClose);
    EXPECT_NEAR(result->loss_sum, Sum(wanted.losses), 1e-4);
    double divergence_sum = 0;
    for (size_t i = 0; i < wanted.divergence.size(); ++i) {
      divergence_sum +=
          wanted.divergence[i] * (problem.token_weights.empty() ? 1.0F : problem.token_weights[i]);
    }
    EXPECT_NEAR(result->divergence_sum, divergence_sum, 1e-4);
    ASSERT_TRUE(session.Close().ok());
    ASSERT_TRUE(client_->DeleteHead("student").ok());
    ASSERT_TRUE(client_->DeleteHead(kTeacher).ok());
  }
};

TEST_F(DistillationTest, EveryDivergenceAndNumberGoesThere) {
  Start();
  for (const kernels::Divergence divergence : kDivergences) {
    // None, temperature, weights of both losses, scales and softcaps of both heads, and all there is.
    for (const int options : {0, 1, 2, 8, kAllSoftOptions}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + ", " + std::to_string(options));
      Problem problem = Taught(divergence);
      UseWithSoftTargets(problem, options);
      ExpectStep(problem);
    }
  }
}

TEST_F(DistillationTest, ATeacherMayBeInBFloat16) {
  Problem problem = Taught();
  problem.teacher = RandomTeacher(
      problem.shape, {.hidden = kTeacherHidden, .type = kernels::DataType::kBFloat16, .seed = 9});
  Start();
  ExpectStep(problem);
}

TEST_F(DistillationTest, AHeadThatTeachesItselfHasNothingToLearn) {
  Problem problem = Taught();
  problem.teacher = kernels::testing::Itself(problem, {});
  Start();
  const Head head = MakeStudent(problem);
  Session session = OpenAt(head);
  Results got(problem);
  Batch batch = got.batch();
  batch.distillation->teacher = "student";
  const auto result = session.Compute(batch, got.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  for (const float divergence : got.divergences) EXPECT_NEAR(divergence, 0, 1e-6);
  for (const float dx : got.dx) EXPECT_NEAR(dx, 0, 1e-6);
}

TEST_F(DistillationTest, AMeanDividesTheDivergenceAsItDoesTheCrossEntropy) {
  Problem problem = Taught();
  problem.teacher->distillation.label_weight = 0.5F;
  problem.gradient_scale = 1.0F / (kTokens - 3);
  const StepResult wanted = RunStep(problem, {.top_k = 0});
  Start();
  MakeTeacher(problem);
  const Head head = MakeStudent(problem);
  Session session = OpenAt(head);
  Results got(problem);
  Batch batch = got.batch();
  batch.reduction = Reduction::kMean;
  batch.gradient_scale = 1;
  const auto result = session.Compute(batch, got.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(result->loss, Sum(wanted.losses) / (kTokens - 3), 1e-6);
  EXPECT_TRUE(SameBits(got.dx, wanted.dx));
  EXPECT_LT(RelativeError(FlushOf(head, session), Wide(wanted.dw)), kClose);
}

TEST_F(DistillationTest, TwoPhasesWorkOnTheWholeLossOfATokenAndPhaseOneAddsNothing) {
  Problem problem = Taught();
  Start();
  MakeTeacher(problem);
  const Head head = MakeStudent(problem);
  Session session = OpenAt(head);
  Results first(problem);
  Batch batch = first.batch();
  batch.mode = ComputeMode::kLossOnly;
  const auto values =
      session.Compute(batch, {.losses = first.losses, .returns = {.divergences = first.divergences}});
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_TRUE(SameBits(first.losses, RunStep(problem).losses));
  EXPECT_THAT(FlushOf(head, session), Each(0));

  problem.token_weights = first.losses;  // of half the sum of squares
  Results second(problem);
  batch = second.batch();
  batch.weight_version = values->weight_version;
  ASSERT_TRUE(session.Compute(batch, second.outputs()).ok());
  const StepResult wanted = RunStep(problem, {.top_k = 0});
  EXPECT_TRUE(SameBits(second.dx, wanted.dx));
  EXPECT_LT(RelativeError(FlushOf(head, session), Wide(wanted.dw)), kClose);
}

TEST_F(DistillationTest, NewWeightsOfTheTeacherHoldFromTheNextBatchOn) {
  Problem problem = Taught();
  Start();
  MakeTeacher(problem);
  Session session = OpenAt(MakeStudent(problem));
  Results got(problem);
  EXPECT_EQ(session.Compute(got.batch(), got.outputs())->teacher_weight_version, 1U);
  problem.teacher->weight = RandomTeacher(problem.shape, {.hidden = kTeacherHidden, .seed = 99}).weight;
  MakeTeacher(problem);
  const auto result = session.Compute(got.batch(), got.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->teacher_weight_version, 2U);
  EXPECT_TRUE(SameBits(got.divergences, RunStep(problem, {.top_k = 0}).divergence));
}

TEST_F(DistillationTest, ATeacherThatIsNotThereIsNamedAddsNothingAndTheSessionGoesOn) {
  const Problem problem = Taught();
  Start();
  const Head head = MakeStudent(problem);
  Session session = OpenAt(head);
  Results got(problem);
  const auto refusal = [&](absl::StatusCode code) {
    const absl::Status status = session.Compute(got.batch(), got.outputs()).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("[field options.distillation.teacher]"));
    return std::string(status.message());
  };
  EXPECT_THAT(refusal(absl::StatusCode::kNotFound), HasSubstr("head 'teacher' does not exist"));
  const HeadConfig config{.name = kTeacher, .vocab_size = kVocab, .hidden_size = kTeacherHidden};
  ASSERT_TRUE(client_->CreateHead(config).ok());
  EXPECT_THAT(refusal(absl::StatusCode::kFailedPrecondition), HasSubstr("has no weights yet"));
  ASSERT_TRUE(client_->DeleteHead(kTeacher).ok());
  HeadConfig wider = config;
  wider.vocab_size = kVocab + 1;
  const auto other = client_->CreateHead(wider);
  ASSERT_TRUE(other.ok()) << other.status();
  const std::vector<float> weights((kVocab + 1) * kTeacherHidden);
  ASSERT_TRUE(other->WriteWeights(DataType::kFloat32, weights.data()).ok());
  EXPECT_THAT(refusal(absl::StatusCode::kInvalidArgument), HasSubstr("vocab_size 62; head student has 61"));
  ASSERT_TRUE(client_->DeleteHead(kTeacher).ok());
  MakeTeacher(problem);
  EXPECT_THAT(FlushOf(head, session), Each(0));
  EXPECT_TRUE(session.Compute(got.batch(), got.outputs()).ok()) << "the session goes on";
}

// The width of the teacher's hidden states is the caller's word for it.
TEST_F(DistillationTest, HiddenStatesOfAnotherWidthThanTheTeachersAreRefused) {
  const Problem problem = Taught();
  Start();
  MakeTeacher(problem);
  Session session = OpenAt(MakeStudent(problem));
  Results got(problem);
  Batch batch = got.batch();
  batch.distillation->hidden_size = kTeacherHidden / 2;
  const absl::Status status = session.Compute(batch, got.outputs()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("[field teacher_hidden_states]"));
}

}  // namespace
}  // namespace lossd::distillation_test
