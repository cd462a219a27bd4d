// Which tokens of a batch travel, and where their results belong.
#include "client/src/batch/sent_tokens.h"

#include <gtest/gtest.h>

#include <random>
#include <span>
#include <vector>

namespace lossd::internal::sent_tokens_test {
namespace {

constexpr int64_t kIgnored = -7;

// The places of sent tokens [first, first + tokens).
std::vector<int64_t> Places(const SentTokens& sent, int64_t first, int64_t tokens) {
  std::vector<int64_t> places;
  int64_t end = -1;
  for (const SentTokens::Run& run : sent.Runs(first, tokens)) {
    EXPECT_GT(run.tokens, 0);
    EXPECT_GT(run.first, end) << "neighbours are one run";
    for (int64_t i = 0; i < run.tokens; ++i) places.push_back(run.first + i);
    end = run.first + run.tokens;
  }
  return places;
}

Batch BatchOf(const std::vector<int64_t>& labels) { return {.labels = labels, .ignore_index = kIgnored}; }

std::vector<bool> Needed(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs) {
  const NeededTokens needed(head, batch, outputs);
  std::vector<bool> tokens(needed.size());
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = needed.Has(i);
  return tokens;
}

TEST(SentTokensTest, ATokenWhoseFactorsAreAllZeroIsNotNeeded) {
  const std::vector<int64_t> labels = {1, 1, 1, kIgnored, 1};
  const std::vector<float> weights = {0, 0, 0, 1, 2};
  const std::vector<float> lse = {0, 1, 0, 0, 0};
  const std::vector<float> entropy = {0, 0, -1, 0, 0};
  Batch batch = BatchOf(labels);
  batch.token_weights = weights;
  batch.lse_gradients = lse;
  batch.entropy_gradients = entropy;
  EXPECT_EQ(Needed({}, batch, {}), (std::vector<bool>{false, true, true, false, true}));
  batch.entropy_gradients = {};
  EXPECT_EQ(Needed({}, batch, {}), (std::vector<bool>{false, true, false, false, true}));
  batch.mode = ComputeMode::kLossOnly;
  EXPECT_EQ(Needed({}, batch, {}), (std::vector<bool>{false, false, false, false, true}))
      << "gradients mean nothing there";
  batch.token_weights = {};
  EXPECT_EQ(Needed({}, batch, {}), (std::vector<bool>{true, true, true, false, true})) << "weights are 1";
}

TEST(SentTokensTest, WhatHasNoWeightNeedsEveryLabelledToken) {
  const std::vector<int64_t> labels = {1, kIgnored};
  const std::vector<float> weights = {0, 0};
  std::vector<float> values(2);
  std::vector<int32_t> tokens(2);
  Batch batch = BatchOf(labels);
  batch.token_weights = weights;
  const std::vector<bool> all = {true, false};
  const std::vector<bool> none = {false, false};
  EXPECT_EQ(Needed({}, batch, {.losses = values}), none);
  EXPECT_EQ(Needed({}, batch, {.returns = {.z_losses = values}}), none);
  EXPECT_EQ(Needed({}, batch, {.returns = {.log_sum_exp = values}}), all);
  EXPECT_EQ(Needed({}, batch, {.returns = {.log_probabilities = values}}), all);
  EXPECT_EQ(Needed({}, batch, {.returns = {.entropies = values}}), all);
  EXPECT_EQ(Needed({}, batch, {.returns = {.predictions = tokens}}), all);
  HeadConfig weighted;
  weighted.has_class_weights = true;
  EXPECT_EQ(Needed(weighted, batch, {}), all) << "their sum is the server's";
  batch.loss.class_weights = ClassWeights::kIgnore;
  EXPECT_EQ(Needed(weighted, batch, {}), none);
}

TEST(SentTokensTest, AllOfThemAreOneRun) {
  const SentTokens sent = SentTokens::All(5);
  EXPECT_EQ(sent.count(), 5);
  EXPECT_EQ(sent.Runs(0, 5).size(), 1U);
  EXPECT_EQ(Places(sent, 2, 2), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(sent.PlaceOf(4), 4);
}

TEST(SentTokensTest, NoneOfNothing) {
  EXPECT_EQ(SentTokens::All(0).count(), 0);
  EXPECT_TRUE(SentTokens::All(0).Runs(0, 0).empty());
  const std::vector<int64_t> ignored(3, kIgnored);
  const Batch batch = BatchOf(ignored);
  const SentTokens sent = SentTokens::Of(NeededTokens({}, batch, {}));
  EXPECT_EQ(sent.count(), 0);
  EXPECT_TRUE(sent.Runs(0, 0).empty());
}

TEST(SentTokensTest, EveryRangeOfLabelledTokensIsWhereTheLabelsAre) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> labels(1 + random() % 40);
    std::vector<int64_t> places;
    for (size_t i = 0; i < labels.size(); ++i) {
      labels[i] = random() % 3 == 0 ? kIgnored : static_cast<int64_t>(100 + i);
      if (labels[i] != kIgnored) places.push_back(static_cast<int64_t>(i));
    }
    const Batch batch = BatchOf(labels);
    const SentTokens sent = SentTokens::Of(NeededTokens({}, batch, {}));
    const auto count = static_cast<int64_t>(places.size());
    ASSERT_EQ(sent.count(), count);
    for (int64_t first = 0; first < count; ++first) {
      EXPECT_EQ(sent.PlaceOf(first), places[static_cast<size_t>(first)]);
      for (int64_t tokens = 1; tokens <= count - first; ++tokens) {
        const std::vector<int64_t> expected(places.begin() + first, places.begin() + first + tokens);
        ASSERT_EQ(Places(sent, first, tokens), expected) << first << "+" << tokens;
        const auto runs = sent.Runs(first, tokens);
        for (const int64_t label : Gather(std::span<const int64_t>(labels), std::span(runs))) {
          EXPECT_NE(label, kIgnored);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lossd::internal::sent_tokens_test
