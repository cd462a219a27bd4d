// Soft targets of another head through real gRPC on the CPU device, against the fp64 reference; what becomes
// of batches whose teacher is written to, deleted, or never was there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_server/client_server_fixture.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::distillation_test {
namespace {

using kernels::testing::Problem;
using kernels::testing::RandomProblem;
using kernels::testing::RandomTeacher;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::RunReference;
using kernels::testing::TeacherProblem;
using testing::ClientServerTest;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kVocab;
using testing::RandomFloats;

constexpr int64_t kTokens = 23;
constexpr int64_t kTeacherHidden = 12;
constexpr int64_t kChunkTokens = 5;
constexpr double kClose = 5e-6;
constexpr char kTeacher[] = "teacher";

// Three tokens are ignored.
Problem Taught() {
  Problem problem = RandomProblem({.shape = {kTokens, kVocab, kHidden}, .logit_deviation = 2.0});
  problem.labels[0] = problem.labels[11] = problem.labels[kTokens - 1] = -100;
  problem.gradient_scale = 0.125F;
  problem.teacher =
      RandomTeacher(problem.shape, {.hidden = kTeacherHidden, .logit_deviation = 2.0, .seed = 7});
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
};

double Sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

TEST_F(DistillationTest, EveryDivergenceAndNumberIsThatOfTheReference) {
  using kernels::Divergence;
  struct Case {
    std::string name;
    std::function<void(Problem&)> set;
  };
  const auto soft = [](const kernels::Distillation& distillation) {
    return [distillation](Problem& p) { p.teacher->distillation = distillation; };
  };
  const std::vector<Case> cases = {
      {"forward", soft({})},
      {"reverse", soft({.divergence = Divergence::kReverseKl})},
      {"Jensen and Shannon's", soft({.divergence = Divergence::kJensenShannon, .beta = 0.25F})},
      {"temperature", soft({.temperature = 2})},
      {"weights of both", soft({.weight = 0.5F, .label_weight = 0.25F})},
      {"a teacher with scale and softcap",
       [](Problem& p) {
         p.teacher->logit_scale = 0.5F;
         p.teacher->softcap = 3;
       }},
      {"a teacher in bf16",
       [](Problem& p) {
         p.teacher = RandomTeacher(
             p.shape, {.hidden = kTeacherHidden, .type = kernels::DataType::kBFloat16, .seed = 9});
       }},
      {"everything",
       [](Problem& p) {
         p.options = {.logit_scale = 1.5F, .softcap = 4, .label_smoothing = 0.1F, .lse_square_scale = 0.02F};
         p.z_gradient_scale = 0.5F;
         p.class_weights = RandomFloats(kVocab, 3);
         for (float& weight : p.class_weights) weight = weight * weight + 0.25F;
         p.token_weights = RandomFloats(kTokens, 4);
         p.lse_gradients = RandomFloats(kTokens, 5);
         p.entropy_gradients = RandomFloats(kTokens, 7);
         p.teacher->softcap = 5;
         p.teacher->distillation = {.divergence = Divergence::kJensenShannon,
                                    .beta = 0.3F,
                                    .temperature = 1.5F,
                                    .weight = 2,
                                    .label_weight = 0.5F};
       }},
  };
  Start();
  for (const Case& test_case : cases) {
    SCOPED_TRACE(test_case.name);
    Problem problem = Taught();
    test_case.set(problem);
    const Reference wanted = RunReference(problem);
    MakeTeacher(problem);
    const Head head = MakeStudent(problem);
    Session session = OpenAt(head);
    Results got(problem);
    const auto result = session.Compute(got.batch(), got.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_GE(result->chunks, 4);
    EXPECT_EQ(result->teacher_weight_version, 1U);
    EXPECT_LT(RelativeError(got.losses, wanted.losses), kClose);
    EXPECT_LT(RelativeError(got.dx, wanted.dx), kClose);
    EXPECT_LT(RelativeError(got.log_sum_exp, wanted.log_sum_exp), kClose);
    EXPECT_LT(RelativeError(got.divergences, wanted.divergence), kClose);
    EXPECT_LT(RelativeError(FlushOf(head, session), wanted.dw), kClose);
    EXPECT_NEAR(result->loss_sum, Sum(wanted.losses), 1e-4);
    double divergence_sum = 0;
    for (size_t i = 0; i < wanted.divergence.size(); ++i) {
      const double weight = problem.token_weights.empty() ? 1 : problem.token_weights[i];
      divergence_sum += weight * wanted.divergence[i];
    }
    EXPECT_NEAR(result->divergence_sum, divergence_sum, 1e-4);
    ASSERT_TRUE(session.Close().ok());
    ASSERT_TRUE(client_->DeleteHead("student").ok());
    ASSERT_TRUE(client_->DeleteHead(kTeacher).ok());
  }
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
  const Reference wanted = RunReference(problem);
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
  EXPECT_LT(RelativeError(got.dx, wanted.dx), kClose);
  EXPECT_LT(RelativeError(FlushOf(head, session), wanted.dw), kClose);
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
  EXPECT_LT(RelativeError(first.losses, RunReference(problem).losses), kClose);
  EXPECT_THAT(FlushOf(head, session), Each(0));

  problem.token_weights = first.losses;  // of half the sum of squares
  Results second(problem);
  batch = second.batch();
  batch.weight_version = values->weight_version;
  ASSERT_TRUE(session.Compute(batch, second.outputs()).ok());
  const Reference wanted = RunReference(problem);
  EXPECT_LT(RelativeError(second.dx, wanted.dx), kClose);
  EXPECT_LT(RelativeError(FlushOf(head, session), wanted.dw), kClose);
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
  EXPECT_LT(RelativeError(got.divergences, RunReference(problem).divergence), kClose);
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
