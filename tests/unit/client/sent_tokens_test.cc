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
  const SentTokens sent = SentTokens::Labelled(ignored, kIgnored);
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
    const SentTokens sent = SentTokens::Labelled(labels, kIgnored);
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
