// Every loss option and return through real gRPC on the CPU device, against the fp64 reference; means,
// phases, frozen heads and scaled flushes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client_server/client_server_fixture.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::loss_options_test {
namespace {

using kernels::testing::Problem;
using kernels::testing::RandomProblem;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::RunReference;
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

std::vector<float> Positive(int64_t count, uint32_t seed) {
  std::vector<float> values = RandomFloats(count, seed);
  for (float& value : values) value = value * value + 0.25F;
  return values;
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

void ExpectTokens(const Everything& got, const Reference& wanted) {
  for (int64_t row = 0; row < kTokens; ++row) {
    const auto at = static_cast<size_t>(row);
    const int64_t label = got.problem.labels[at];
    if (label == -100) {
      EXPECT_EQ(got.predictions[at], -1);
      EXPECT_EQ(got.target_ranks[at], -1);
      EXPECT_EQ(got.top_tokens[at * kTopK], -1);
      continue;
    }
    const double* const logits = wanted.logits.data() + row * kVocab;
    std::vector<int32_t> order(kVocab);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    EXPECT_EQ(got.predictions[at], order[0]);
    EXPECT_EQ(got.target_ranks[at], std::find(order.begin(), order.end(), label) - order.begin());
    for (size_t k = 0; k < kTopK; ++k) {
      EXPECT_EQ(got.top_tokens[at * kTopK + k], order[k]);
      EXPECT_NEAR(got.top_log_probabilities[at * kTopK + k], logits[order[k]] - wanted.log_sum_exp[at], 1e-4);
    }
  }
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
};

TEST_F(LossOptionsTest, EveryOptionAndEveryReturnIsThatOfTheReference) {
  struct Case {
    std::string name;
    std::function<void(Problem&)> set;
  };
  const std::vector<Case> cases = {
      {"plain", [](Problem&) {}},
      {"logit scale", [](Problem& p) { p.options.logit_scale = 0.5F; }},
      {"softcap", [](Problem& p) { p.options.softcap = 3; }},
      {"label smoothing", [](Problem& p) { p.options.label_smoothing = 0.25F; }},
      {"z-loss", [](Problem& p) { p.options.lse_square_scale = 0.01F; }},
      {"z-loss with a scale of its own",
       [](Problem& p) {
         p.options.lse_square_scale = 0.01F;
         p.z_gradient_scale = 2;
       }},
      {"class weights", [](Problem& p) { p.class_weights = Positive(kVocab, 3); }},
      {"bias", [](Problem& p) { p.bias = RandomFloats(kVocab, 6); }},
      {"token weights", [](Problem& p) { p.token_weights = RandomFloats(kTokens, 4); }},
      {"gradients of the log-sum-exp", [](Problem& p) { p.lse_gradients = RandomFloats(kTokens, 5); }},
      {"gradients of the entropy", [](Problem& p) { p.entropy_gradients = RandomFloats(kTokens, 7); }},
      {"all",
       [](Problem& p) {
         p.options = {.logit_scale = 1.5F, .softcap = 4, .label_smoothing = 0.1F, .lse_square_scale = 0.02F};
         p.z_gradient_scale = 0.5F;
         p.class_weights = Positive(kVocab, 3);
         p.bias = RandomFloats(kVocab, 6);
         p.token_weights = RandomFloats(kTokens, 4);
         p.lse_gradients = RandomFloats(kTokens, 5);
         p.entropy_gradients = RandomFloats(kTokens, 7);
       }},
  };
  Start();
  for (const Case& test_case : cases) {
    SCOPED_TRACE(test_case.name);
    Problem problem = Plain();
    test_case.set(problem);
    const Reference wanted = RunReference(problem);
    const Head head = MakeHead(problem);
    Session session = OpenAt(head);
    Everything got(problem);
    const auto result = session.Compute(got.batch(), got.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->chunks, 4);  // of the labelled tokens
    EXPECT_LT(RelativeError(got.losses, wanted.losses), kClose);
    EXPECT_LT(RelativeError(got.dx, wanted.dx), kClose);
    EXPECT_LT(RelativeError(got.log_sum_exp, wanted.log_sum_exp), kClose);
    EXPECT_LT(RelativeError(got.z_losses, wanted.z_loss), kClose);
    EXPECT_LT(RelativeError(got.log_probabilities, wanted.log_probability), kClose);
    EXPECT_LT(RelativeError(got.entropies, wanted.entropy), kClose);
    ExpectTokens(got, wanted);
    std::vector<float> db;
    EXPECT_LT(RelativeError(FlushOf(head, session, 1.0F, &db), wanted.dw), kClose);
    if (!db.empty()) {
      EXPECT_LT(RelativeError(db, wanted.db), kClose);
    }
    EXPECT_NEAR(result->z_loss_sum, std::accumulate(wanted.z_loss.begin(), wanted.z_loss.end(), 0.0), 1e-4);
    EXPECT_NEAR(result->class_weight_sum,
                problem.class_weights.empty() ? 0 : ClassWeightSum(problem.labels, problem.class_weights),
                1e-4);
    ASSERT_TRUE(session.Close().ok());
    ASSERT_TRUE(client_->DeleteHead("options").ok());
  }
}

TEST_F(LossOptionsTest, LossesOverListsOfTokensAreThoseOfTheReferenceInAnyCut) {
  Problem problem = Plain();
  problem.lse_gradients = RandomFloats(kTokens, 5);
  problem.entropy_gradients = RandomFloats(kTokens, 7);
  problem.bias = RandomFloats(kVocab, 6);
  problem.options = {.logit_scale = 1.5F, .softcap = 4, .lse_square_scale = 0.02F};
  KeepTokens(problem, 0.2);
  const Reference wanted = RunReference(problem);
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
  EXPECT_LT(RelativeError(got.losses, wanted.losses), kClose);
  EXPECT_LT(RelativeError(got.dx, wanted.dx), kClose);
  EXPECT_LT(RelativeError(got.log_sum_exp, wanted.log_sum_exp), kClose);
  EXPECT_LT(RelativeError(got.log_probabilities, wanted.log_probability), kClose);
  EXPECT_LT(RelativeError(got.entropies, wanted.entropy), kClose);
  std::vector<float> db;
  EXPECT_LT(RelativeError(FlushOf(head, session, 1.0F, &db), wanted.dw), kClose);
  EXPECT_LT(RelativeError(db, wanted.db), kClose);

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

// The i-th row's q over the lists of the batch, at its tokens, and what it leaves of 1, in fp64.
struct Targets {
  std::vector<double> q = std::vector<double>(kVocab);
  std::vector<bool> listed = std::vector<bool>(kVocab);
  double rest = 1;
};

Targets TargetsOf(const TargetLists& lists, size_t row) {
  Targets targets;
  for (auto k = static_cast<size_t>(lists.lists.offsets[row]);
       k < static_cast<size_t>(lists.lists.offsets[row + 1]); ++k) {
    const auto token = static_cast<size_t>(lists.lists.tokens[k]);
    targets.listed[token] = true;
    targets.q[token] = static_cast<double>(lists.probabilities[k]);
    targets.rest -= targets.q[token];
  }
  targets.rest = std::max(0.0, targets.rest);
  return targets;
}

TEST_F(LossOptionsTest, SoftTargetsOnListsAreThoseOfTheirFormulaInAnyCut) {
  Problem problem = Plain();
  problem.bias = RandomFloats(kVocab, 6);
  problem.token_weights = RandomFloats(kTokens, 4);
  problem.options.lse_square_scale = 0.02F;
  KeepTokens(problem, 0.2);
  // Not the labels, but their neighbours, are in all lists. Every third list leaves nothing to other tokens.
  std::vector<int32_t> tokens;
  for (const int32_t token : std::exchange(problem.kept_tokens, {})) tokens.push_back((token + 1) % kVocab);
  const std::vector<int64_t> offsets = std::exchange(problem.kept_offsets, {});
  std::vector<float> probabilities = Positive(static_cast<int64_t>(tokens.size()), 8);
  for (size_t i = 0; i < kTokens; ++i) {
    const auto list =
        std::span(probabilities)
            .subspan(static_cast<size_t>(offsets[i]), static_cast<size_t>(offsets[i + 1] - offsets[i]));
    const float sum = std::accumulate(list.begin(), list.end(), 0.0F);
    for (float& value : list) value *= (i % 3 == 0 ? 1.0F : 0.75F) / sum;
  }
  const Reference plain = RunReference(problem);
  Start();
  const Head head = MakeHead(problem);
  Session session = OpenAt(head);
  Everything got(problem);
  Batch batch = got.batch();
  batch.target_lists = {.lists = {.offsets = offsets, .tokens = tokens},
                        .probabilities = probabilities,
                        .weight = 0.5F,
                        .label_weight = 0.25F};
  std::vector<float> divergences(kTokens);
  BatchOutputs outputs = got.outputs();
  outputs.returns.divergences = divergences;
  const auto result = session.Compute(batch, outputs);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->chunks, 4);

  std::vector<double> losses(kTokens);
  std::vector<double> wanted_divergences(kTokens);
  std::vector<double> dx(kTokens * kHidden);
  std::vector<double> dw(kVocab * kHidden);
  std::vector<double> db(kVocab);
  const std::vector<float> weight = problem.Weight();
  double divergence_sum = 0;
  for (size_t i = 0; i < kTokens; ++i) {
    if (problem.labels[i] == -100) continue;
    const auto label = static_cast<size_t>(problem.labels[i]);
    const double* const logits = plain.logits.data() + i * kVocab;
    const double lse = plain.log_sum_exp[i];
    const Targets targets = TargetsOf(batch.target_lists, i);
    double others = 1;
    double divergence = 0;
    for (size_t v = 0; v < kVocab; ++v) {
      if (!targets.listed[v]) continue;
      others -= std::exp(logits[v] - lse);
      divergence += targets.q[v] * (std::log(targets.q[v]) - (logits[v] - lse));
    }
    if (targets.rest > 0) divergence += targets.rest * std::log(targets.rest / others);
    const double weight_of_token = problem.token_weights[i];
    wanted_divergences[i] = divergence;
    divergence_sum += weight_of_token * divergence;
    losses[i] = weight_of_token *
                (0.25 * (lse - logits[label]) + 0.5 * divergence + static_cast<double>(0.02F) * lse * lse);
    double listed = 0;
    for (const double q : targets.q) listed += q;
    for (size_t v = 0; v < kVocab; ++v) {
      const double p = std::exp(logits[v] - lse);
      const double of_label = p - (v == label ? 1 : 0);
      const double of_targets =
          (listed + targets.rest) * p - targets.q[v] - (targets.listed[v] ? 0 : targets.rest * p / others);
      const double factor = static_cast<double>(problem.gradient_scale) * weight_of_token *
                            (0.25 * of_label + 0.5 * of_targets + 2 * static_cast<double>(0.02F) * lse * p);
      db[v] += factor;
      for (size_t j = 0; j < kHidden; ++j) {
        dx[i * kHidden + j] += factor * static_cast<double>(weight[v * kHidden + j]);
        dw[v * kHidden + j] += factor * static_cast<double>(got.x[i * kHidden + j]);
      }
    }
  }
  EXPECT_LT(RelativeError(got.losses, losses), kClose);
  EXPECT_LT(RelativeError(divergences, wanted_divergences), kClose);
  EXPECT_NEAR(result->divergence_sum, divergence_sum, 1e-4);
  EXPECT_LT(RelativeError(got.dx, dx), kClose);
  EXPECT_LT(RelativeError(got.log_sum_exp, plain.log_sum_exp), kClose);
  EXPECT_LT(RelativeError(got.entropies, plain.entropy), kClose);
  ExpectTokens(got, plain);
  std::vector<float> found_db;
  EXPECT_LT(RelativeError(FlushOf(head, session, 1.0F, &found_db), dw), kClose);
  EXPECT_LT(RelativeError(found_db, db), kClose);
}

TEST_F(LossOptionsTest, WhatBelongsToTheHeadHoldsForBatchesThatDoNotNameIt) {
  Problem problem = Plain();
  problem.options = {.logit_scale = 0.5F, .softcap = 3};
  problem.class_weights = Positive(kVocab, 3);
  Start();
  const Head head = MakeHead(problem, {.name = "", .logit_scale = 0.5F, .softcap = 3});
  EXPECT_TRUE(head.config().has_class_weights);
  EXPECT_EQ(head.config().softcap, 3);
  Session session = OpenAt(head);
  Everything got(problem);
  Batch batch = got.batch();
  batch.loss = {};
  ASSERT_TRUE(session.Compute(batch, got.outputs()).ok());
  EXPECT_LT(RelativeError(got.losses, RunReference(problem).losses), kClose);
  batch.loss = {.logit_scale = 1.0F, .softcap = 0.0F, .class_weights = ClassWeights::kIgnore};
  ASSERT_TRUE(session.Compute(batch, got.outputs()).ok());
  EXPECT_LT(RelativeError(got.losses, RunReference(Plain()).losses), kClose);

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
  const Reference with = RunReference(problem);
  EXPECT_LT(RelativeError(got.losses, with.losses), kClose);
  batch.loss.bias = Bias::kIgnore;
  ASSERT_TRUE(session.Compute(batch, got.outputs()).ok());
  const Reference without = RunReference(Plain());
  EXPECT_LT(RelativeError(got.losses, without.losses), kClose);
  EXPECT_LT(RelativeError(got.dx, without.dx), kClose);
  std::vector<float> db;
  const std::vector<float> dw = FlushOf(head, session, 2.0F, &db);
  std::vector<double> both(with.dw.size());
  for (size_t i = 0; i < both.size(); ++i) both[i] = 2 * (with.dw[i] + without.dw[i]);
  EXPECT_LT(RelativeError(dw, both), kClose);
  std::vector<double> twice = with.db;
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
  const Reference wanted = RunReference(problem);
  EXPECT_LT(RelativeError(second.dx, wanted.dx), kClose);
  EXPECT_LT(RelativeError(FlushOf(head, session), wanted.dw), kClose);

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
    EXPECT_LT(RelativeError(got.dx, RunReference(problem).dx), kClose);
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
