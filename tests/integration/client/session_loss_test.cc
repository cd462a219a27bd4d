// lossd::Session and loss options: what chunks carry, where returns go, how losses are reduced, what is
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::session_loss_test {
namespace {

using testing::Data;
using testing::Fate;
using ::testing::HasSubstr;
using testing::kHeadName;
using testing::kHidden;
using testing::kVocab;
using testing::SessionTest;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class SessionLossTest : public SessionTest {};

std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST_F(SessionLossTest, APlainBatchSendsNoOptions) {
  Session session = Open();
  Data data(3);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  for (const v1::Chunk& chunk : server_.observed().chunks) {
    EXPECT_FALSE(chunk.has_options());
    EXPECT_FALSE(chunk.has_token_inputs());
  }
  EXPECT_EQ(result->loss, result->loss_sum);
}

TEST_F(SessionLossTest, EveryChunkCarriesTheOptionsAndItsShareOfTheInputs) {
  Session session = Open("trainer", 2);
  Data data(7);
  std::vector<float> weights = {1, 2, 3, 4, 5, 6, 7};
  std::vector<float> lse_gradients = {-1, -2, -3, -4, -5, -6, -7};
  std::vector<float> entropy_gradients = {0, 0, 2, 0, 3, 4, 5};
  Batch batch = data.batch();
  batch.loss = {.label_smoothing = 0.1F, .lse_square_scale = 1e-4F, .logit_scale = 0.5F, .softcap = 0.0F};
  batch.loss.class_weights = ClassWeights::kIgnore;
  batch.token_weights = weights;
  batch.lse_gradients = lse_gradients;
  batch.entropy_gradients = entropy_gradients;
  batch.z_gradient_scale = 0.25F;
  batch.weight_version = 1;
  const auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  for (const v1::Chunk& chunk : server_.observed().chunks) {
    const v1::LossOptions& options = chunk.options();
    EXPECT_EQ(options.label_smoothing(), 0.1F);
    EXPECT_EQ(options.lse_square_scale(), 1e-4F);
    EXPECT_EQ(options.logit_scale(), 0.5F);
    EXPECT_TRUE(options.has_softcap());
    EXPECT_EQ(options.softcap(), 0.0F);
    EXPECT_TRUE(options.has_class_weights());
    EXPECT_FALSE(options.class_weights());
    EXPECT_EQ(options.z_gradient_scale(), 0.25F);
    EXPECT_EQ(options.weight_version(), 1U);
    EXPECT_FALSE(options.has_returns());
    const auto first = static_cast<size_t>(chunk.first_token());
    const auto end = first + static_cast<size_t>(chunk.tokens());
    EXPECT_EQ(Floats(chunk.token_inputs().weights()),
              std::vector<float>(weights.begin() + static_cast<int64_t>(first),
                                 weights.begin() + static_cast<int64_t>(end)));
    EXPECT_EQ(Floats(chunk.token_inputs().lse_gradients()),
              std::vector<float>(lse_gradients.begin() + static_cast<int64_t>(first),
                                 lse_gradients.begin() + static_cast<int64_t>(end)));
    EXPECT_EQ(Floats(chunk.token_inputs().entropy_gradients()),
              std::vector<float>(entropy_gradients.begin() + static_cast<int64_t>(first),
                                 entropy_gradients.begin() + static_cast<int64_t>(end)));
  }
  EXPECT_EQ(result->z_loss_sum, 7);
}

// What no weights have, so that a second phase that demands it is refused.
TEST_F(SessionLossTest, ABatchThatMetDifferentWeightsIsOfVersionZero) {
  Session session = Open("trainer", 2);
  Data data(7);
  EXPECT_EQ(session.Compute(data.batch(), data.outputs())->weight_version, 1U);
  server_.Before(4, [this] {
    server_.AwaitApplied(5);
    server_.Publish(kHeadName);
  });
  EXPECT_EQ(session.Compute(data.batch(), data.outputs())->weight_version, 0U);
}

TEST_F(SessionLossTest, AMeanIsOverTheCountThatIsNamedOrThatOfTheBatch) {
  Session session = Open();
  Data data(5);
  data.labels[1] = -100;
  Batch batch = data.batch();
  batch.reduction = Reduction::kMean;
  auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->loss, result->loss_sum / 4);
  EXPECT_EQ(server_.observed().chunks.back().gradient_scale(), 0.25F);

  batch.normalizer = 8;
  batch.gradient_scale = 2;
  result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->loss, result->loss_sum / 8);
  EXPECT_EQ(server_.observed().chunks.back().gradient_scale(), 0.25F);
  EXPECT_FALSE(server_.observed().chunks.back().options().has_z_gradient_scale());
}

TEST_F(SessionLossTest, AMeanWithClassWeightsAndAZLossHasACountForEach) {
  server_.config.class_weights = std::vector<float>(kVocab, 2);
  Session session = Open();
  Data data(4);
  Batch batch = data.batch();
  batch.loss.lse_square_scale = 0.5F;
  batch.reduction = Reduction::kMean;
  batch.normalizer = 16;
  batch.z_normalizer = 8;
  const auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->class_weight_sum, 8);
  EXPECT_EQ(result->loss, (result->loss_sum - 4) / 16 + 4.0 / 8);
  const v1::Chunk chunk = server_.observed().chunks.back();
  EXPECT_EQ(chunk.gradient_scale(), 1.0F / 16);
  EXPECT_EQ(chunk.options().z_gradient_scale(), 1.0F / 8);
}

TEST_F(SessionLossTest, AMeanOfNothingIsNothing) {
  Session session = Open();
  Data data(2);
  data.labels = {-100, -100};
  Batch batch = data.batch();
  batch.reduction = Reduction::kMean;
  const auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->loss, 0);
  EXPECT_TRUE(server_.observed().chunks.empty());
}

TEST_F(SessionLossTest, ALateMeanIsASumNowAndAScaleOfTheFlush) {
  Session session = Open();
  Data data(3);
  Batch batch = data.batch();
  batch.reduction = Reduction::kLateMean;
  const auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->loss, result->loss_sum);
  EXPECT_EQ(server_.observed().chunks.back().gradient_scale(), 1);
  std::vector<float> gradient(kVocab * kHidden);
  const std::vector<SessionMarks> marks = {session.marks()};
  ASSERT_TRUE(head_->Flush({.gradient_scale = 0.125F}, marks, gradient.data()).ok());
  EXPECT_EQ(server_.observed().flushes.back().gradient_scale(), 0.125F);
}

// Losses and dX of a frozen head are in no window: nothing is lost with its server.
TEST_F(SessionLossTest, ARestartedServerOfAFrozenHeadLosesNoWindow) {
  server_.config.frozen = true;
  Session session = Open();
  Data first(2);
  ASSERT_TRUE(session.Compute(first.batch(), first.outputs()).ok());
  server_.Restart();
  Data second(2);
  const absl::Status status = session.Compute(second.batch(), second.outputs()).status();
  EXPECT_FALSE(IsWindowLost(status)) << status;
  EXPECT_TRUE(session.Compute(second.batch(), second.outputs()).ok());
}

TEST_F(SessionLossTest, WhatCannotBeComputedIsRefusedBeforeAnythingIsSent) {
  static const std::vector<float> kOne = {1};
  static const std::vector<float> kBad = {1, kNaN};
  static std::vector<float> room(5);
  static std::vector<int32_t> token_room(5);
  struct Case {
    std::function<void(Batch&, BatchOutputs&)> spoil;
    std::string message;
  };
  const std::vector<Case> cases = {
      {[](Batch& b, BatchOutputs&) { b.loss.label_smoothing = 1.5F; },
       "label_smoothing is 1.5; it must be in [0, 1]"},
      {[](Batch& b, BatchOutputs&) { b.loss.lse_square_scale = -1; }, "lse_square_scale is -1"},
      {[](Batch& b, BatchOutputs&) { b.loss.logit_scale = 0; },
       "logit_scale is 0; it must be finite and above 0"},
      {[](Batch& b, BatchOutputs&) { b.loss.softcap = -1; }, "softcap is -1"},
      {[](Batch& b, BatchOutputs&) { b.loss.class_weights = ClassWeights::kUse; },
       "created without class weights"},
      {[](Batch& b, BatchOutputs&) { b.token_weights = kOne; },
       "token_weights has 1 values but labels has 2"},
      {[](Batch& b, BatchOutputs&) { b.lse_gradients = kBad; }, "lse_gradients[1] is nan; it must be finite"},
      {[](Batch& b, BatchOutputs&) { b.entropy_gradients = kBad; },
       "entropy_gradients[1] is nan; it must be finite"},
      {[](Batch& b, BatchOutputs&) { b.entropy_gradients = kOne; },
       "entropy_gradients has 1 values but labels has 2"},
      {[](Batch& b, BatchOutputs&) { b.z_gradient_scale = kNaN; }, "z_gradient_scale is nan"},
      {[](Batch& b, BatchOutputs&) { b.normalizer = 3; }, "normalizer is 3, but reduction is not kMean"},
      {[](Batch& b, BatchOutputs&) {
         b.reduction = Reduction::kMean;
         b.normalizer = 0;
       },
       "normalizer is 0; it must be finite and above 0"},
      {[](Batch&, BatchOutputs& o) { o.returns.top_k = 12; }, "top_k is 12; it must be in [0, 11]"},
      {[](Batch&, BatchOutputs& o) { o.returns.entropies = room; },
       "entropies has room for 5 values; 2 tokens have 2"},
      {[](Batch&, BatchOutputs& o) { o.returns.top_tokens = token_room; },
       "top_tokens has room for 5 values; 2 tokens have 0"},
  };
  Session session = Open();
  Data data(2);
  for (const Case& bad : cases) {
    Batch batch = data.batch();
    BatchOutputs outputs = data.outputs();
    bad.spoil(batch, outputs);
    const absl::Status status = session.Compute(batch, outputs).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
  EXPECT_TRUE(server_.observed().chunks.empty());
}

TEST_F(SessionLossTest, MeansWithClassWeightsNeedTheirCountsAndNoLateOneHasTwo) {
  server_.config.class_weights = std::vector<float>(kVocab, 2);
  Session session = Open();
  Data data(2);
  Batch batch = data.batch();
  const auto refusal = [&] {
    const absl::Status status = session.Compute(batch, data.outputs()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  batch.reduction = Reduction::kMean;
  EXPECT_THAT(refusal(), HasSubstr("normalizer is not set"));
  batch.loss.lse_square_scale = 1e-4F;
  batch.normalizer = 3;
  EXPECT_THAT(refusal(), HasSubstr("z_normalizer is not"));
  batch.normalizer.reset();
  batch.z_normalizer = 3;
  EXPECT_THAT(refusal(), HasSubstr("z_normalizer is set and normalizer is not"));
  batch.z_normalizer.reset();
  batch.reduction = Reduction::kLateMean;
  EXPECT_THAT(refusal(), HasSubstr("two means with a count each"));
  batch.loss.class_weights = ClassWeights::kIgnore;
  EXPECT_TRUE(session.Compute(batch, data.outputs()).ok());
}

TEST_F(SessionLossTest, ASessionDoesNotGoOnWithAHeadThatHasClassWeightsNow) {
  Connect();
  server_.config.class_weights = std::vector<float>(kVocab, 2);
  server_.RecreateHead();
  const absl::Status status = head_->OpenSession({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is now one with class weights"));
}

TEST_F(SessionLossTest, ASessionDoesNotGoOnWithAHeadThatHasABiasNowOrIsFrozen) {
  Connect();
  server_.config.bias = true;
  server_.RecreateHead();
  absl::Status status = head_->OpenSession({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is now one with a bias"));
  server_.config.bias = false;
  server_.config.frozen = true;
  server_.RecreateHead();
  status = head_->OpenSession({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("is now frozen; this handle was made when it was trained"));
}

TEST_F(SessionLossTest, ABiasThatTheHeadHasNotCannotBeUsedAndOneThatItHasCanBeLeftOut) {
  {
    Session session = Open();
    Data data(2);
    Batch batch = data.batch();
    batch.loss.bias = Bias::kUse;
    const absl::Status status = session.Compute(batch, data.outputs()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("bias is kUse"));
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
    EXPECT_FALSE(server_.observed().chunks.back().options().has_bias());
  }
  server_.config.bias = true;
  server_.RecreateHead();
  Connect();  // anew: a handle does not go on with a head that was changed
  Session session = Open();
  Data data(2);
  Batch batch = data.batch();
  for (const Bias bias : {Bias::kIgnore, Bias::kUse}) {
    batch.loss.bias = bias;
    ASSERT_TRUE(session.Compute(batch, data.outputs()).ok());
    const v1::LossOptions options = server_.observed().chunks.back().options();
    EXPECT_TRUE(options.has_bias());
    EXPECT_EQ(options.bias(), bias == Bias::kUse);
  }
}

TEST_F(SessionLossTest, CreateHeadSendsWhatBelongsToTheWeights) {
  Connect();
  const HeadConfig config{.name = "h",
                          .vocab_size = 2,
                          .hidden_size = 3,
                          .logit_scale = 0.5F,
                          .softcap = 30,
                          .frozen = true,
                          .bias = true,
                          .class_weights = {1, 2}};
  ASSERT_TRUE(client_->CreateHead(config).ok());
  const v1::CreateHeadRequest request = server_.observed().creations.back();
  EXPECT_EQ(request.config().logit_scale(), 0.5F);
  EXPECT_EQ(request.config().softcap(), 30.0F);
  EXPECT_TRUE(request.config().frozen());
  EXPECT_TRUE(request.config().bias());
  EXPECT_EQ(Floats(request.class_weights()), (std::vector<float>{1, 2}));
  // This device has none, as the answer says.
  EXPECT_FALSE(
      client_->CreateHead({.name = "fixed", .vocab_size = 2, .hidden_size = 3, .fixed_segments = true}).ok());
  EXPECT_TRUE(server_.observed().creations.back().config().fixed_segments());
  EXPECT_EQ(
      client_->CreateHead({.name = "h", .vocab_size = 2, .hidden_size = 3, .logit_scale = 0}).status().code(),
      absl::StatusCode::kInvalidArgument);
}

// Also of chunks whose first answer was lost.
TEST_F(SessionLossTest, ReturnsOfEveryTokenComeToItsPlace) {
  Script(2, Fate::kCutBeforeAnswer);
  Session session = Open();
  Data data(7);
  std::vector<float> lse_gradients = {-1, -2, -3, -4, -5, -6, -7};
  std::vector<float> log_sum_exp(7);
  std::vector<float> entropies(7);
  std::vector<int32_t> predictions(7);
  std::vector<int32_t> top_tokens(21);
  Batch batch = data.batch();
  batch.lse_gradients = lse_gradients;
  BatchOutputs outputs = data.outputs();
  outputs.returns = {.log_sum_exp = log_sum_exp,
                     .entropies = entropies,
                     .predictions = predictions,
                     .top_k = 3,
                     .top_tokens = top_tokens};
  const auto result = session.Compute(batch, outputs);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(session.reconnects(), 1);
  EXPECT_EQ(result->correct_tokens, 7);
  EXPECT_EQ(log_sum_exp, lse_gradients);
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_EQ(entropies[i], static_cast<float>(data.labels[i]));
    EXPECT_EQ(predictions[i], data.labels[i]);
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(top_tokens[i * 3 + k], data.labels[i] + static_cast<int64_t>(k));
    }
  }
}

TEST_F(SessionLossTest, AnAnswerWithOtherReturnsThanAskedForIsAnError) {
  server_.recorder().Edit<v1::ComputeResponse>("Compute", [](auto* answer) {
    if (answer->has_result()) answer->mutable_result()->mutable_returns()->mutable_entropies()->resize(4);
  });
  Session session = Open();
  Data data(2);
  std::vector<float> entropies(2, -1);
  BatchOutputs outputs = data.outputs();
  outputs.returns.entropies = entropies;
  const absl::Status status = session.Compute(data.batch(), outputs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("4 bytes of entropies; 2 tokens have 8"));
  EXPECT_EQ(entropies, std::vector<float>(2, -1));
}

}  // namespace
}  // namespace lossd::session_loss_test
