#include "client/examples/train_lm/text/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace lossd::train_lm::split_test {
namespace {

using ::testing::ElementsAre;

Tokens Range(int32_t first, size_t count) {
  Tokens tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Tokens Joined(std::initializer_list<Tokens> parts) {
  Tokens all;
  for (const Tokens& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Chapter OfSize(size_t bytes, ChapterKind kind = ChapterKind::kBody) {
  return {.title = "t", .kind = kind, .paragraphs = {std::string(bytes, 'x')}};
}

TEST(Split, HoldsOutTheChapterClosestToItsShareButNeverFrontMatter) {
  EXPECT_EQ(
      HeldOutChapter({"d", {OfSize(100, ChapterKind::kFrontMatter), OfSize(700), OfSize(130), OfSize(670)}}),
      2);
  EXPECT_EQ(HeldOutChapter({"d", {OfSize(100, ChapterKind::kFrontMatter), OfSize(700)}}), -1);
}

TEST(Split, RemovesEveryPositionOfASharedNgramAndCutsThere) {
  const Tokens quote = Range(100, 25);
  const std::vector<Tokens> held_out = {Joined({Range(1000, 30), quote, Range(2000, 30)})};
  const std::vector<Tokens> training = {Joined({Range(0, 10), quote, Range(50, 10)}), Range(300, 40)};
  EXPECT_EQ(CountSharedNgrams(training, held_out, 20), 6);

  const DisjointText disjoint = RemoveSharedNgrams(training, held_out, 20);
  EXPECT_THAT(disjoint.segments, ElementsAre(Range(0, 10), Range(50, 10), Range(300, 40)));
  EXPECT_EQ(disjoint.removed_tokens, 25);
  EXPECT_EQ(CountSharedNgrams(disjoint.segments, held_out, 20), 0);
}

TEST(Split, KeepsWhatIsSharedOnlyInShorterRuns) {
  const std::vector<Tokens> held_out = {Joined({Range(1000, 30), Range(100, 19), Range(2000, 30)})};
  const std::vector<Tokens> training = {Joined({Range(0, 10), Range(100, 19), Range(50, 10)})};
  EXPECT_EQ(RemoveSharedNgrams(training, held_out, 20).removed_tokens, 0);
}

TEST(Split, MakesNoNewSharedNgramAcrossACut) {
  // Without the cut, what surrounds the quote would join to an n-gram of the held-out text.
  const Tokens quote = Range(100, 20);
  const std::vector<Tokens> held_out = {quote, Range(0, 20)};
  const std::vector<Tokens> training = {Joined({Range(0, 10), quote, Range(10, 10)})};
  const DisjointText disjoint = RemoveSharedNgrams(training, held_out, 20);
  EXPECT_THAT(disjoint.segments, ElementsAre(Range(0, 10), Range(10, 10)));
  EXPECT_EQ(CountSharedNgrams(disjoint.segments, held_out, 20), 0);
}

}  // namespace
}  // namespace lossd::train_lm::split_test
