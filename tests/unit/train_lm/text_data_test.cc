#include "client/examples/train_lm/text/text_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "absl/strings/str_cat.h"

namespace lossd::train_lm::text_data_test {
namespace {

using ::testing::ElementsAre;

Document Numbers(int64_t paragraphs) {
  std::string text;
  for (int64_t i = 0; i < paragraphs; ++i) {
    absl::StrAppend(&text, "The number ", i, " comes before the number ", i + 1, " and after ", i - 1,
                    ".\n\n");
  }
  return ParseDocument("numbers", text);
}

TEST(TextData, PadsEverySequenceSoThatNoContextReachesIntoItsNeighbour) {
  const std::vector<Tokens> sequences = {{5, 6}, {7}};
  const TokenText text = JoinSequences(sequences, 1, 3);
  EXPECT_THAT(text.tokens, ElementsAre(1, 1, 1, 5, 6, 1, 1, 1, 7));
  EXPECT_THAT(text.positions, ElementsAre(3, 4, 8));
}

TEST(TextData, SmoothesUnigramsAndMeasuresThemOnHeldOutText) {
  const std::vector<Document> documents = {Numbers(400)};
  const absl::StatusOr<TextData> data = PrepareText(documents, {.vocabulary = 300, .padding = 4});
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->vocabulary, 300);
  double sum = 0;
  for (const float log_probability : data->unigram) sum += std::exp(static_cast<double>(log_probability));
  EXPECT_NEAR(sum, 1, 1e-5);
  EXPECT_EQ(data->shared_ngrams, 0);
  EXPECT_THAT(data->held_out_chapters, ElementsAre(::testing::StartsWith("numbers: block ")));
  const double share = static_cast<double>(data->held_out.positions.size()) /
                       static_cast<double>(data->training.positions.size() + data->held_out.positions.size());
  EXPECT_NEAR(share, 1.0 / kBlocks, 0.02);
  const double perplexity = UnigramPerplexity(data->held_out, data->unigram);
  EXPECT_GT(perplexity, 2);
  EXPECT_LT(perplexity, 300);
}

TEST(TextData, PerplexityOfAUniformModelIsTheSizeOfTheVocabulary) {
  const std::vector<Tokens> sequences = {{0, 3, 2, 1}};
  const std::vector<float> uniform(8, std::log(1.0f / 8));
  EXPECT_NEAR(UnigramPerplexity(JoinSequences(sequences, 1, 2), uniform), 8, 1e-5);
}

TEST(TextData, IsTheSameEveryTime) {
  const std::vector<Document> documents = {Numbers(300)};
  const absl::StatusOr<TextData> one = PrepareText(documents, {.vocabulary = 200, .padding = 4});
  const absl::StatusOr<TextData> two = PrepareText(documents, {.vocabulary = 200, .padding = 4});
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(one->training.tokens, two->training.tokens);
  EXPECT_EQ(one->held_out.tokens, two->held_out.tokens);
}

TEST(TextData, TakesASmallerVocabularyWhenTheTextHasNoMore) {
  const std::vector<Document> documents = {Numbers(30)};
  const absl::StatusOr<TextData> data = PrepareText(documents, {.vocabulary = 8192, .padding = 4});
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_LT(data->vocabulary, 200);
  EXPECT_EQ(data->unigram.size(), static_cast<size_t>(data->vocabulary));
}

TEST(TextData, SaysWhenNothingCanBeHeldOut) {
  const std::vector<Document> one_paragraph = {ParseDocument("tiny", "One paragraph.\n")};
  EXPECT_EQ(PrepareText(one_paragraph, {.vocabulary = 64, .padding = 4}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(TextData, PassesOnWhyNoTokenizerCanBeMade) {
  const std::vector<Document> documents = {Numbers(100)};
  const absl::Status status = PrepareText(documents, {.vocabulary = 5, .padding = 4}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("ocab"));
}

}  // namespace
}  // namespace lossd::train_lm::text_data_test
