// The loss options of chunks and heads: what is refused, and what they come to together.
#include "server/engine/chunk/chunk_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/common/errors.h"
#include "server/engine/device/batch_key.h"

namespace lossd::engine::chunk_options_test {
namespace {

using ::testing::HasSubstr;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kVocab = 4;

HeadConfig WeightedHead() {
  HeadConfig head{.name = "h", .vocab_size = kVocab, .hidden_size = 2};
  head.class_weights = std::make_shared<const std::vector<float>>(std::vector<float>{1, 0, 2, 4});
  return head;
}

std::string Bytes(const std::vector<float>& values) {
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

Chunk TwoTokens() {
  Chunk chunk;
  chunk.tokens = 2;
  chunk.labels.assign(16, '\0');
  chunk.hidden_states = Payload::Of(std::string(16, '\0'));
  return chunk;
}

TEST(ChunkOptions, WhatCannotBeComputedIsRefusedByNameAndValue) {
  struct Case {
    std::function<void(Chunk&)> spoil;
    std::string field;
    std::string message;
  };
  const std::vector<Case> cases = {
      {[](Chunk& c) { c.options.loss.label_smoothing = 1.5f; }, "options.label_smoothing",
       "is 1.5; it must be in [0, 1]"},
      {[](Chunk& c) { c.options.loss.label_smoothing = -0.1f; }, "options.label_smoothing", "is -0.1"},
      {[](Chunk& c) { c.options.loss.label_smoothing = kNaN; }, "options.label_smoothing", "is nan"},
      {[](Chunk& c) { c.options.loss.lse_square_scale = -1; }, "options.lse_square_scale",
       "is -1; it must be finite and at least 0"},
      {[](Chunk& c) { c.options.loss.lse_square_scale = kInfinity; }, "options.lse_square_scale", "is inf"},
      {[](Chunk& c) { c.options.Set(&kernels::LossOptions::softcap, -2.0f); }, "options.softcap",
       "is -2; it must be finite and above 0, or 0 for none"},
      {[](Chunk& c) { c.options.Set(&kernels::LossOptions::softcap, kNaN); }, "options.softcap", "is nan"},
      {[](Chunk& c) { c.options.Set(&kernels::LossOptions::logit_scale, 0.0f); }, "options.logit_scale",
       "is 0; it must be finite and above 0"},
      {[](Chunk& c) { c.options.Set(&kernels::LossOptions::logit_scale, kInfinity); }, "options.logit_scale",
       "is inf"},
      {[](Chunk& c) { c.options.z_gradient_scale = kNaN; }, "options.z_gradient_scale",
       "is nan; it must be finite"},
      {[](Chunk& c) { c.options.returns.top_k = -1; }, "options.returns.top_k",
       "is -1; it must be in [0, 4]"},
      {[](Chunk& c) { c.options.returns.top_k = 5; }, "options.returns.top_k", "is 5; it must be in [0, 4]"},
      {[](Chunk& c) { c.token_weights = Bytes({1}); }, "token_inputs.weights",
       "holds 4 bytes; 2 fp32 values are 8"},
      {[](Chunk& c) {
         c.token_weights = Bytes({1, kNaN});
       },
       "token_inputs.weights", "[1] is nan; it must be finite"},
      {[](Chunk& c) {
         c.lse_gradients = Bytes({1, 2, 3});
       },
       "token_inputs.lse_gradients", "holds 12 bytes"},
      {[](Chunk& c) {
         c.lse_gradients = Bytes({-kInfinity, 0});
       },
       "token_inputs.lse_gradients", "[0] is -inf"},
      {[](Chunk& c) {
         c.entropy_gradients = Bytes({1, 2, 3});
       },
       "token_inputs.entropy_gradients", "holds 12 bytes"},
      {[](Chunk& c) {
         c.entropy_gradients = Bytes({0, kInfinity});
       },
       "token_inputs.entropy_gradients", "[1] is inf; it must be finite"},
  };
  EXPECT_TRUE(ValidateContent(TwoTokens(), WeightedHead(), {}).ok());
  for (const Case& bad : cases) {
    Chunk chunk = TwoTokens();
    bad.spoil(chunk);
    const absl::Status status = ValidateContent(chunk, WeightedHead(), {});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.field;
    EXPECT_EQ(FieldOf(status), bad.field);
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
}

TEST(ChunkOptions, TheBiasIsThatOfTheHeadUnlessTheChunkDoesWithout) {
  HeadConfig plain = WeightedHead();
  HeadConfig biased = WeightedHead();
  biased.bias = true;
  Chunk chunk = TwoTokens();
  EXPECT_EQ(KindOf(chunk, plain).bias, Bias::kIgnore);
  EXPECT_EQ(KindOf(chunk, biased).bias, Bias::kUse);
  chunk.options.bias = Bias::kIgnore;
  EXPECT_EQ(KindOf(chunk, biased).bias, Bias::kIgnore);
  EXPECT_NE(KindOf(chunk, biased), KindOf(TwoTokens(), biased)) << "never computed together";
  EXPECT_TRUE(ValidateOptions(chunk, plain).ok()) << "what is not there can be ignored";
  chunk.options.bias = Bias::kUse;
  EXPECT_TRUE(ValidateOptions(chunk, biased).ok());
  const absl::Status status = ValidateOptions(chunk, plain);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(status), "options.bias");
  EXPECT_THAT(std::string(status.message()), HasSubstr("head h was created without a bias"));
}

TEST(ChunkOptions, FixedSegmentsAreThoseOfTheHead) {
  HeadConfig fixed = WeightedHead();
  fixed.fixed_segments = true;
  EXPECT_EQ(KindOf(TwoTokens(), WeightedHead()).segments, kernels::Segments::kOfRanks);
  EXPECT_EQ(KindOf(TwoTokens(), fixed).segments, kernels::Segments::kFixed);
  EXPECT_NE(KindOf(TwoTokens(), fixed), KindOf(TwoTokens(), WeightedHead())) << "never computed together";
}

TEST(ChunkOptions, ClassWeightsAreThoseOfTheHeadUnlessTheChunkDoesWithout) {
  HeadConfig plain = WeightedHead();
  plain.class_weights = nullptr;
  Chunk chunk = TwoTokens();
  EXPECT_EQ(KindOf(chunk, plain).class_weights, ClassWeights::kIgnore);
  EXPECT_EQ(KindOf(chunk, WeightedHead()).class_weights, ClassWeights::kUse);
  chunk.options.class_weights = ClassWeights::kIgnore;
  EXPECT_EQ(KindOf(chunk, WeightedHead()).class_weights, ClassWeights::kIgnore);
  chunk.options.class_weights = ClassWeights::kUse;
  const absl::Status status = ValidateContent(chunk, plain, {});
  EXPECT_EQ(FieldOf(status), "options.class_weights");
  EXPECT_THAT(std::string(status.message()), HasSubstr("head h was created without class weights"));
}

TEST(ChunkOptions, NumbersOfTheHeadHoldUnlessTheChunkHasItsOwn) {
  HeadConfig head = WeightedHead();
  head.logit_scale = 0.5f;
  head.softcap = 30;
  Chunk chunk = TwoTokens();
  EXPECT_EQ(KindOf(chunk, head).options, (kernels::LossOptions{.logit_scale = 0.5f, .softcap = 30}));
  chunk.options.Set(&kernels::LossOptions::logit_scale, 2.0f);
  chunk.options.Set(&kernels::LossOptions::softcap, 0.0f);
  chunk.options.loss.label_smoothing = 0.1f;
  chunk.options.loss.lse_square_scale = 1e-4f;
  EXPECT_EQ(KindOf(chunk, head).options,
            (kernels::LossOptions{.logit_scale = 2, .label_smoothing = 0.1f, .lse_square_scale = 1e-4f}));
}

TEST(ChunkOptions, ChunksWithAndWithoutDxShareNoBatch) {
  const HeadConfig head = WeightedHead();
  Chunk chunk = TwoTokens();
  chunk.dx_type = kernels::DataType::kBFloat16;
  const BatchKey with = KindOf(chunk, head);
  chunk.mode = ComputeMode::kLossAndWeightGradient;
  const BatchKey without = KindOf(chunk, head);
  EXPECT_FALSE(with == without);
  chunk.dx_type = kernels::DataType::kFloat16;
  EXPECT_TRUE(KindOf(chunk, head) == without) << "the type of what there is none of";
}

TEST(ChunkOptions, AnAnswerCountsWhatIsReturnedOfEachToken) {
  Chunk chunk = TwoTokens();
  EXPECT_GT(AnswerBytes(chunk, 2), 2 * 4);
  chunk.mode = ComputeMode::kLossAndWeightGradient;
  EXPECT_EQ(AnswerBytes(chunk, 2), 2 * 4);
  chunk.mode = ComputeMode::kLossOnly;
  EXPECT_EQ(AnswerBytes(chunk, 2), 2 * 4);
  chunk.options.returns = {.log_sum_exp = true, .entropy = true, .prediction = true, .top_k = 3};
  EXPECT_EQ(AnswerBytes(chunk, 2), 2 * 4 * (1 + 3 + 2 * 3));
  TokenReturns returns;
  Allocate(ReturnsOf(chunk), chunk.tokens, &returns);
  EXPECT_EQ(returns.bytes() + 2 * 4, AnswerBytes(chunk, 2));
  chunk.options.returns.top_k = std::numeric_limits<int32_t>::max();  // refused later
  EXPECT_LT(AnswerBytes(chunk, 2), 2000);
  chunk.options.returns.top_k = -7;
  EXPECT_EQ(AnswerBytes(chunk, 2), 2 * 4 * (1 + 3));
}

TEST(ChunkOptions, SumsLeaveIgnoredTokensOut) {
  Chunk chunk = TwoTokens();
  chunk.tokens = 3;
  const std::vector<int64_t> labels = {3, -100, 2};
  chunk.labels.assign(reinterpret_cast<const char*>(labels.data()), 24);
  ChunkAnswer answer;
  answer.losses = Bytes({1.5f, 8, 2});
  answer.returns.z_losses = Bytes({0.5f, 8, 0.25f});
  const std::vector<int32_t> predictions = {3, -1, 1};
  answer.returns.predictions.assign(reinterpret_cast<const char*>(predictions.data()), 12);
  SumTokens(chunk, WeightedHead().class_weights->data(), &answer);
  EXPECT_EQ(answer.valid_tokens, 2);
  EXPECT_EQ(answer.loss_sum, 3.5);
  EXPECT_EQ(answer.z_loss_sum, 0.75);
  EXPECT_EQ(answer.correct_tokens, 1);
  EXPECT_EQ(answer.class_weight_sum, 6);
}

TEST(ChunkOptions, LossesThatAreNotFiniteAreCountedAndCanBeLeftOut) {
  Chunk chunk = TwoTokens();
  chunk.tokens = 4;
  const std::vector<int64_t> labels = {3, -100, 2, 1};
  chunk.labels.assign(reinterpret_cast<const char*>(labels.data()), 32);
  ChunkAnswer answer;
  answer.losses = Bytes({1.5f, INFINITY, NAN, 2});
  SumTokens(chunk, nullptr, &answer);
  EXPECT_EQ(answer.valid_tokens, 3);
  EXPECT_EQ(answer.non_finite_losses, 1) << "what is ignored has no loss";
  EXPECT_TRUE(std::isnan(answer.loss_sum)) << "the client is told";
  EXPECT_EQ(SumOfFiniteLosses(chunk, answer), 3.5);
}

TEST(HeadOptions, WhatCannotBeComputedIsRefusedByNameAndValue) {
  struct Case {
    std::function<void(HeadConfig&)> spoil;
    std::string field;
    std::string message;
  };
  const auto weights = [](const std::vector<float>& values) {
    return [values](HeadConfig& head) {
      head.class_weights = std::make_shared<const std::vector<float>>(values);
    };
  };
  const std::vector<Case> cases = {
      {[](HeadConfig& h) { h.logit_scale = -1; }, "logit_scale", "is -1; it must be finite and above 0"},
      {[](HeadConfig& h) { h.softcap = kInfinity; }, "softcap", "is inf"},
      {weights({1, 2, 3}), "class_weights", "holds 3 values; the head has 4 entries"},
      {weights({1, 2, -3, 4}), "class_weights", "[2] is -3; it must be finite and at least 0"},
      {weights({1, kNaN, 3, 4}), "class_weights", "[1] is nan"},
      {weights({0, 0, 0, 0}), "class_weights", "the sum of class_weights is 0"},
      {weights({3e38f, 3e38f, 0, 0}), "class_weights", "it must be above 0 and finite in fp32"},
  };
  EXPECT_TRUE(Validate(WeightedHead()).ok());
  for (const Case& bad : cases) {
    HeadConfig head = WeightedHead();
    bad.spoil(head);
    const absl::Status status = Validate(head);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_EQ(FieldOf(status), bad.field);
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
}

}  // namespace
}  // namespace lossd::engine::chunk_options_test
