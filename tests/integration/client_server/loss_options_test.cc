// Every loss option and return through real gRPC, against the CPU's step, whose bits each row has in any cut;
// means, phases, frozen heads and scaled flushes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_server/client_server_fixture.h"
#include "tests/unit/kernels/option_cases.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::loss_options_test {
namespace {

using kernels::testing::AllOptions;
using kernels::testing::Beside;
using kernels::testing::OptionCase;
using kernels::testing::OptionsAlone;
using kernels::testing::Problem;
using kernels::testing::RandomProblem;
using kernels::testing::RelativeError;
using kernels::testing::RunStep;
using kernels::testing::SameBits;
using kernels::testing::Spread;
using kernels::testing::StepResult;
using testing::ClientServerTest;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kVocab;
using testing::RandomFloats;

constexpr int64_t kTokens = 23;
constexpr int32_t kTopK = 3;
constexpr int64_t kChunkTokens = 5;
constexpr double kClose = 5e-6;

Problem Plain() {
  Problem problem = RandomProblem({.shape = {kTokens, kVocab, kHidden}, .logit_deviation = 2.0});
  problem.labels[0] = problem.labels[11] = problem.labels[kTokens - 1] = -100;
  problem.gradient_scale = 0.125F;
  return problem;
}

// A batch with room for everything that can be had of it.
struct Everything {
  explicit Everything(const Problem& of) : problem(of), x(of.HiddenStates()) {}

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
    batch.kept_tokens = {.offsets = problem.kept_offsets, .tokens = problem.kept_tokens};
    if (problem.targets.has_value()) {
      batch.target_lists = {.lists = {.offsets = problem.targets->offsets, .tokens = problem.targets->tokens},
                            .probabilities = problem.targets->probabilities,
                            .weight = problem.targets->weight,
                            .label_weight = problem.targets->label_weight};
    }
    batch.z_gradient_scale = problem.z_gradient_scale;
    return batch;
  }
  BatchOutputs outputs() {
    return {.losses = losses,
            .dx = dx.data(),
            .returns = {.log_sum_exp = log_sum_exp,
                        .z_losses = z_losses,
                        .log_probabilities = log_probabilities,
                        .entropies = entropies,
                        .predictions = predictions,
                        .target_ranks = target_ranks,
                        .top_k = kTopK,
                        .top_tokens = top_tokens,
                        .top_log_probabilities = top_log_probabilities}};
  }

  const Problem& problem;
  std::vector<float> x;
  std::vector<float> losses = std::vector<float>(kTokens);
  std::vector<float> dx = std::vector<float>(kTokens * kHidden);
  std::vector<float> log_sum_exp = losses;
  std::vector<float> z_losses = losses;
  std::vector<float> log_probabilities = losses;
  std::vector<float> entropies = losses;
  std::vector<int32_t> predictions = std::vector<int32_t>(kTokens);
  std::vector<int32_t> target_ranks = predictions;
  std::vector<int32_t> top_tokens = std::vector<int32_t>(kTokens * kTopK);
  std::vector<float> top_log_probabilities = std::vector<float>(kTokens * kTopK);
};

std::vector<double> Wide(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// A row has the same bits in any batch.
void ExpectBits(const Everything& got, const StepResult& wanted) {
  EXPECT_TRUE(SameBits(got.losses, wanted.losses));
  EXPECT_TRUE(SameBits(got.dx, wanted.dx));
  EXPECT_TRUE(SameBits(got.log_sum_exp, wanted.log_sum_exp));
  EXPECT_TRUE(SameBits(got.z_losses, wanted.z_loss));
  EXPECT_TRUE(SameBits(got.log_probabilities, wanted.log_probability));
  EXPECT_TRUE(SameBits(got.entropies, wanted.entropy));
}

class LossOptionsTest : public ClientServerTest {
 protected:
  // A head of its own with the problem's weights.
  Head MakeHead(const Problem& problem, HeadConfig config = {}) {
    config.name = "options";
    config.vocab_size = kVocab;
    config.hidden_size = kHidden;
    config.weight_type = DataType::kFloat32;
    config.class_weights = problem.class_weights;
    config.bias = !problem.bias.empty();
    auto head = client_->CreateHead(config);
    EXPECT_TRUE(head.ok()) << head.status();
    const auto written = head->WriteWeights(DataType::kFloat32, problem.weight.data(), problem.bias);
    EXPECT_TRUE(written.ok()) << written.status();
    return *std::move(head);
  }
  static Session OpenAt(const Head& head) {
    auto session = head.OpenSession({.chunk_bytes = kChunkTokens * kHidden * 4});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }
  // dW; and db of a head with a bias.
  static std::vector<float> FlushOf(const Head& head, const Session& session, float scale = 1.0F,
                                    std::vector<float>* bias_gradient = nullptr) {
    std::vector<float> gradient(kVocab * kHidden);
    std::vector<float> bias(static_cast<size_t>(head.config().bias ? kVocab : 0));
    const std::vector<SessionMarks> marks = {session.marks()};
    const auto flushed = head.Flush({.gradient_scale = scale}, marks, gradient.data(), bias);
    EXPECT_TRUE(flushed.ok()) << flushed.status();
    const double squares = std::inner_product(bias.begin(), bias.end(), bias.begin(), 0.0);
    EXPECT_NEAR(flushed->bias_norm, std::sqrt(squares), 1e-6 * std::sqrt(squares));
    if (bias_gradient != nullptr) *bias_gradient = bias;
    return gradient;
  }
  // Sums over chunks, which are as close as their order lets them be.
  static void ExpectGradients(const Head& head, const Session& session, const StepResult& wanted) {
    std::vector<float> db;
    EXPECT_LT(RelativeError(FlushOf(head, session, 1.0F, &db), Wide(wanted.dw)), kClose);
    EXPECT_LT(RelativeError(db, Wide(wanted.db)), kClose);
  }
};

TEST_F(LossOptionsTest, EveryOptionAndEveryReturnGoesThereAndBack) {
  std::vector<OptionCase> cases = OptionsAlone();
  cases.push_back(AllOptions());
  Start();
  for (const OptionCase& options : cases) {
    SCOPED_TRACE(options.name);
    Problem problem = Plain();
    options.set(problem);
    const StepResult wanted = RunStep(problem, {.top_k = kTopK});
    const Head head = MakeHead(problem);
    Session session = OpenAt(head);
    Everything got(problem);
    const auto result = session.Compute(got.batch(), got.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->chunks, 4);  // of the labelled tokens
    ExpectBits(got, wanted);
    EXPECT_EQ(got.predictions, wanted.prediction);
    EXPECT_EQ(got.target_ranks, wanted.target_rank);
    EXPECT_EQ(got.top_tokens, wanted.top_tokens);
    EXPECT_EQ(got.top_log_probabilities, wanted.top_log_probabilities);
    ExpectGradients(head, session, wanted);
    EXPECT_NEAR(result->z_loss_sum, std::accumulate(wanted.z_loss.begin(), wanted.z_loss.end(), 0.0), 1e-4);
    EXPECT_NEAR(result->class_weight_sum,
                problem.class_weights.empty() ? 0 : ClassWeightSum(problem.labels, problem.class_weights),
                1e-4);
    ASSERT_TRUE(session.Close().ok());
    ASSERT_TRUE(client_->DeleteHead("options").ok());
  }
}

TEST_F(LossOptionsTest, LossesOverListsOfTokensAreTheSameInAnyCut) {
  Problem problem = Plain();
  AllOptions(Beside::kLists).set(problem);
  KeepTokens(problem, 0.2);
  const StepResult wanted = RunStep(problem, {.top_k = 0});
  Start();
  const Head head = MakeHead(problem);
  Session session = OpenAt(head);
  Everything got(problem);
  BatchOutputs outputs = got.outputs();
  outputs.returns.top_k = 0;
  outputs.returns.top_tokens = {};
  outputs.returns.top_log_probabilities = {};
  const auto result = session.Compute(got.batch(), outputs);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->chunks, 4);
  ExpectBits(got, wanted);
  ExpectGradients(head, session, wanted);

  // What the client can see is wrong before anything is sent.
  Batch batch = got.batch();
  batch.kept_tokens.offsets = std::span(problem.kept_offsets).first(kTokens);
  auto refused = session.Compute(batch, outputs);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("kept_tokens.offsets has 23 values"));
  batch.kept_tokens = {.offsets = problem.kept_offsets,
                       .tokens = std::span(problem.kept_tokens).first(problem.kept_tokens.size() - 1)};
  refused = session.Compute(batch, outputs);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("they must be equal"));
}

TEST_F(LossOptionsTest, SoftTargetsOnListsAreTheSameInAnyCut) {
  Problem problem = Plain();
  AllOptions(Beside::kLists).set(problem);
  problem.targets = RandomTargets(problem, 0.2, 0.75);
  problem.targets->weight = 0.5F;
  problem.targets->label_weight = 0.25F;
  const StepResult wanted = RunStep(problem, {.top_k = kTopK});
  Start();
  const Head head = MakeHead(problem);
  Session session = OpenAt(head);
  Everything got(problem);
  std::vector<float> divergences(kTokens);
  BatchOutputs outputs = got.outputs();
  outputs.returns.divergences = divergences;
  const auto result = session.Compute(got.batch(), outputs);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->chunks, 4);
  ExpectBits(got, wanted);
  EXPECT_EQ(divergences, wanted.divergence);
  EXPECT_EQ(got.top_tokens, wanted.top_tokens);
  EXPECT_NEAR(result->divergence_sum,
              std::inner_product(problem.token_weights.begin(), problem.token_weights.end(),
                                 divergences.begin(), 0.0),
              1e-4);
  ExpectGradients(head, session, wanted);
}

TEST_F(LossOptionsTest, WhatBelongsToTheHeadHoldsForBatchesThatDoNotNameIt) {
  Problem problem = Plain();
  problem.options = {.logit_scale = 0.5F, .softcap = 3};
  problem.class_weights = Spread(kVocab, 0.25F, 2.0F);
  Start();
  const Head head = MakeHead(problem, {.name = "", .logit_scale = 0.5F, .softcap = 3});
  EXPECT_TRUE(head.config().has_class_weights);
  EXPECT_EQ(head.config().softcap, 3);
  Session session = OpenAt(head);
  Everything got(problem);
  Batch batch = got.batch();
  batch.loss = {};
  ASSERT_TRUE(session.Compute(batch, got.outputs()).ok());
  EXPECT_TRUE(SameBits(got.losses, RunStep(problem).losses));
  batch.loss = {.logit_scale = 1.0F, .softcap = 0.0F, .class_weights = ClassWeights::kIgnore};
  ASSERT_TRUE(session.Compute(batch, got.outputs()).ok());
  EXPECT_TRUE(SameBits(got.losses, RunStep(Plain()).losses));

  const absl::Status other = client_
                                 ->CreateHead({.name = "options",
                                               .vocab_size = kVocab,
                                               .hidden_size = kHidden,
                                               .weight_type = DataType::kFloat32,
                                               .softcap = 3})
                                 .status();
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(other.message()), HasSubstr("logit_scale 0.5, softcap 3, with class weights"));
}

TEST_F(LossOptionsTest, ABiasIsWrittenReadAndFlushedWithItsWeightsAndCanBeLeftOutOfABatch) {
  Problem problem = Plain();
  problem.bias = RandomFloats(kVocab, 6);
  Start();
  const Head head = MakeHead(problem);
  EXPECT_TRUE(head.config().bias);
  std::vector<float> weights(kVocab * kHidden);
  std::vector<float> bias(kVocab);
  ASSERT_TRUE(head.ReadWeights(DataType::kFloat32, weights.data(), bias).ok());
  EXPECT_EQ(weights, problem.Weight());
  EXPECT_EQ(bias, problem.bias);

  Session session = OpenAt(head);
  Everything got(problem);
  Batch batch = got.batch();
  ASSERT_TRUE(session.Compute(batch, got.outputs()).ok());
  const StepResult with = RunStep(problem);
  EXPECT_TRUE(SameBits(got.losses, with.losses));
  batch.loss.bias = Bias::kIgnore;
  ASSERT_TRUE(session.Compute(batch, got.outputs()).ok());
  const StepResult without = RunStep(Plain());
  EXPECT_TRUE(SameBits(got.losses, without.losses));
  EXPECT_TRUE(SameBits(got.dx, without.dx));
  std::vector<float> db;
  const std::vector<float> dw = FlushOf(head, session, 2.0F, &db);
  std::vector<double> both(with.dw.size());
  for (size_t i = 0; i < both.size(); ++i) both[i] = 2 * (with.dw[i] + without.dw[i]);
  EXPECT_LT(RelativeError(dw, both), kClose);
  std::vector<double> twice = Wide(with.db);
  for (double& value : twice) value *= 2;
  EXPECT_LT(RelativeError(db, twice), kClose) << "of the first batch alone, times the flush's scale";

  const absl::Status torn = head.WriteWeights(DataType::kFloat32, problem.weight.data()).status();
  EXPECT_EQ(torn.code(), absl::StatusCode::kInvalidArgument) << torn;
  bias[3] = std::numeric_limits<float>::quiet_NaN();
  const absl::Status bad = head.WriteWeights(DataType::kFloat32, problem.weight.data(), bias).status();
  EXPECT_EQ(bad.code(), absl::StatusCode::kInvalidArgument) << bad;
  EXPECT_THAT(std::string(bad.message()), HasSubstr("bias[3] is nan"));
}

// Rows so short that their bias is most of a message: clients of other languages accept 4 MiB.
TEST_F(LossOptionsTest, ManyShortRowsWithABiasAreReadInMessagesThatAnyClientAccepts) {
  constexpr int64_t kMany = int64_t{5} << 18;
  testing::TestServerOptions options;
  options.workspace_bytes = 256 << 20;
  Start(options);
  const auto head =
      client_->CreateHead({.name = "narrow", .vocab_size = kMany, .hidden_size = 1, .bias = true});
  ASSERT_TRUE(head.ok()) << head.status();
  const std::vector<float> weights(kMany, 0.5F);
  std::vector<float> bias(kMany);
  std::iota(bias.begin(), bias.end(), 0.0F);
  const auto written = head->WriteWeights(DataType::kFloat32, weights.data(), bias);
  ASSERT_TRUE(written.ok()) << written.status();

  const testing::Stubs stubs(grpc::CreateChannel(server_->target(), grpc::InsecureChannelCredentials()));
  v1::ReadWeightsRequest request;
  request.set_head("narrow");
  grpc::ClientContext context;
  auto reader = stubs.heads->ReadWeights(&context, request);
  v1::ReadWeightsResponse piece;
  std::string read;
  while (reader->Read(&piece)) read += piece.bias();
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  const auto bytes = std::as_bytes(std::span(bias));
  EXPECT_TRUE(read == std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

TEST_F(LossOptionsTest, AHandleOfAHeadThatWasMadeAnewWithABiasOpensNoSession) {
  Start();
  const Head old = MakeHead(Plain());
  ASSERT_TRUE(client_->DeleteHead("options").ok());
  Problem problem = Plain();
  problem.bias = RandomFloats(kVocab, 6);
  const Head biased = MakeHead(problem);
  const absl::Status refused = old.OpenSession({}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("is now one with a bias"));
  ASSERT_TRUE(client_->DeleteHead("options").ok());
  problem.bias.clear();
  HeadConfig config;
  config.frozen = true;
  MakeHead(problem, config);
  EXPECT_THAT(std::string(old.OpenSession({}).status().message()), HasSubstr("is now frozen"));
}

TEST_F(LossOptionsTest, ALateMeanIsTheMean) {
  Problem problem = Plain();
  problem.gradient_scale = 1;
  problem.options.lse_square_scale = 0.01F;
  Start();
  const Head head = MakeHead(problem);
  Session session = OpenAt(head);
  Everything mean(problem);
  Batch batch = mean.batch();
  batch.reduction = Reduction::kMean;
  const auto now = session.Compute(batch, mean.outputs());
  ASSERT_TRUE(now.ok()) << now.status();
  const std::vector<float> mean_dw = FlushOf(head, session);

  Everything late(problem);
  batch = late.batch();
  batch.reduction = Reduction::kLateMean;
  const auto sum = session.Compute(batch, late.outputs());
  ASSERT_TRUE(sum.ok()) << sum.status();
  const auto count = static_cast<double>(CountValid(problem.labels));
  EXPECT_EQ(count, kTokens - 3);
  EXPECT_DOUBLE_EQ(sum->loss / count, now->loss);
  ScaleInPlace(DataType::kFloat32, late.dx.data(), kTokens * kHidden, 1 / count);
  const std::vector<float> late_dw = FlushOf(head, session, static_cast<float>(1 / count));
  EXPECT_LT(RelativeError(late.dx, {mean.dx.begin(), mean.dx.end()}), 1e-6);
  EXPECT_LT(RelativeError(late_dw, {mean_dw.begin(), mean_dw.end()}), 1e-6);
}

// L = Σ l²/2 + Σ e²/20 + Σ h²/2 of losses l, log-sum-exps e and entropies h.
TEST_F(LossOptionsTest, TwoPhasesMakeTheGradientsOfAnOuterFunctionAndOfTheSameWeightsOnly) {
  Problem problem = Plain();
  problem.gradient_scale = 1;
  Start();
  const Head head = MakeHead(problem);
  Session session = OpenAt(head);
  Everything first(problem);
  Batch batch = first.batch();
  batch.mode = ComputeMode::kLossOnly;
  const auto values = session.Compute(
      batch,
      {.losses = first.losses, .returns = {.log_sum_exp = first.log_sum_exp, .entropies = first.entropies}});
  ASSERT_TRUE(values.ok()) << values.status();

  problem.token_weights = first.losses;
  problem.lse_gradients = first.log_sum_exp;
  for (float& gradient : problem.lse_gradients) gradient /= 10;
  problem.entropy_gradients = first.entropies;
  Everything second(problem);
  batch = second.batch();
  batch.weight_version = values->weight_version;
  ASSERT_TRUE(session.Compute(batch, second.outputs()).ok());
  const StepResult wanted = RunStep(problem);
  EXPECT_TRUE(SameBits(second.dx, wanted.dx));
  EXPECT_LT(RelativeError(FlushOf(head, session), Wide(wanted.dw)), kClose);

  ASSERT_TRUE(head.WriteWeights(DataType::kFloat32, problem.weight.data()).ok());
  const absl::Status late = session.Compute(batch, second.outputs()).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(late.message()),
              HasSubstr("options.weight_version is 1; the weights are of version 2"));
  EXPECT_THAT(FlushOf(head, session), ::testing::Each(0)) << "no chunk of it was added";
  batch.weight_version = 2;
  EXPECT_TRUE(session.Compute(batch, second.outputs()).ok()) << "the session goes on";
}

TEST_F(LossOptionsTest, AFrozenHeadGivesDxAndKeepsNoGradient) {
  const Problem problem = Plain();
  Start();
  HeadConfig config;
  config.frozen = true;
  const Head head = MakeHead(problem, config);
  Session session = OpenAt(head);
  Everything got(problem);
  for (int round = 0; round < 2; ++round) {
    const auto result = session.Compute(got.batch(), got.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(SameBits(got.dx, RunStep(problem).dx));
  }
  const auto info = head.Info();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_TRUE(info->config.frozen);
  EXPECT_EQ(info->window_tokens, 0U);
  EXPECT_TRUE(info->sessions.empty());
  for (const MemoryItem& item : info->memory) {
    if (item.purpose == "gradient") {
      EXPECT_EQ(item.bytes, 0);
    }
  }
  std::vector<float> gradient(kVocab * kHidden);
  const absl::Status flush = head.Flush({}, {}, gradient.data()).status();
  EXPECT_EQ(flush.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(flush.message()), HasSubstr("head options is frozen"));
}

}  // namespace
}  // namespace lossd::loss_options_test
