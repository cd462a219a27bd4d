#include "client/examples/train_lm/text/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/scratch_folder.h"

namespace lossd::train_lm::corpus_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Prose(int64_t paragraphs) {
  std::string text;
  for (int64_t i = 0; i < paragraphs; ++i) {
    absl::StrAppend(&text, "   Paragraph ", 1000 + i, " has\n   two lines.\n\n");
  }
  return text;
}

std::vector<std::string> Titles(const Document& document) {
  std::vector<std::string> titles;
  for (const Chapter& chapter : document.chapters) titles.push_back(chapter.title);
  return titles;
}

TEST(Corpus, FindsDocBookChaptersAndKeepsTheTableOfContentsApart) {
  const std::string text = absl::StrCat(
      "Title\n\n    Chapter 1. Not at the start of the line\n\nChapter\xC2\xA0"
      "1.\xC2\xA0One\n\n",
      Prose(20), "Chapter 2. Two\n\n", Prose(2), "see\nChapter of the book\n\n", "Appendix A. Three\n\n",
      Prose(10));
  const Document document = ParseDocument("book", text);
  EXPECT_THAT(Titles(document),
              ElementsAre("(front matter)", "Chapter 1. One", "Chapter 2. Two", "Appendix A. Three"));
  EXPECT_EQ(document.chapters[0].kind, ChapterKind::kFrontMatter);
  EXPECT_EQ(document.chapters[1].kind, ChapterKind::kBody);
  EXPECT_THAT(document.chapters[2].paragraphs,
              ElementsAre("Chapter 2. Two", "Paragraph 1000 has two lines.", "Paragraph 1001 has two lines.",
                          "see Chapter of the book"));
}

TEST(Corpus, FindsSphinxChaptersByTheirUnderline) {
  const std::string text = absl::StrCat("Manual\n******\n\n* 1. First\n\n1. First\n********\n\n", Prose(20),
                                        "1.1. Section\n============\n\n2. no heading without underline\n\n",
                                        "2. Second\n*********\n\n", Prose(2));
  const Document document = ParseDocument("manual", text);
  EXPECT_THAT(Titles(document), ElementsAre("(front matter)", "1. First", "2. Second"));
  EXPECT_THAT(document.chapters[0].paragraphs, ElementsAre("Manual", "* 1. First"));
  EXPECT_EQ(document.chapters[1].paragraphs.back(), "2. no heading without underline");
}

TEST(Corpus, CutsTextWithoutUsableChaptersIntoEqualBlocksOfWholeParagraphs) {
  const Document document = ParseDocument("plain", Prose(1600));
  ASSERT_EQ(document.chapters.size(), static_cast<size_t>(kBlocks));
  for (const Chapter& block : document.chapters) EXPECT_EQ(block.paragraphs.size(), 100U);
  EXPECT_EQ(document.chapters[0].paragraphs[0], "Paragraph 1000 has two lines.");

  const std::string coarse = absl::StrCat("Chapter 1. A\n\n", Prose(40), "Chapter 2. B\n\n", Prose(40));
  EXPECT_EQ(ParseDocument("coarse", coarse).chapters[0].title, "block 1");
}

TEST(Corpus, PutsWrappedTableCellsTogether) {
  const std::string table =
      "  +-------------------+\n"
      "  | key |  what it is |\n"
      "  |-----+-------------|\n"
      "  |     |the caf\xC3\xA9 and  |\n"
      "  |first|its          |\n"
      "  |     |neighbours   |\n"
      "  |-----+-------------|\n"
      "  |b    |a|b          |\n"
      "  +-------------------+\n";
  const Document document = ParseDocument("table", absl::StrCat("Before\n\n", table, "\nAfter\n"));
  std::vector<std::string> paragraphs;
  for (const Chapter& chapter : document.chapters) {
    paragraphs.insert(paragraphs.end(), chapter.paragraphs.begin(), chapter.paragraphs.end());
  }
  EXPECT_THAT(paragraphs, ElementsAre("Before", "key | what it is",
                                      "first | the caf\xC3\xA9 and its neighbours", "b | a|b", "After"));
}

TEST(Corpus, ReadsPlainAndCompressedFilesAlikeAndNamesTheOneThatIsMissing) {
  const lossd::testing::ScratchFolder folder;
  const std::string plain = folder.File("corpus.txt");
  const std::string packed = plain + ".gz";
  for (const auto& [path, mode] : {std::pair(plain, "wbT"), std::pair(packed, "wb")}) {
    gzFile file = gzopen(path.c_str(), mode);
    gzputs(file, "Some words\n\nand more\n");
    gzclose(file);
    const absl::StatusOr<Document> document = ReadDocument(path);
    ASSERT_TRUE(document.ok()) << document.status();
    EXPECT_EQ(document->Bytes(), 18);
  }
  const absl::StatusOr<Document> missing = ReadDocument("no/such.txt");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr("no/such.txt"));
}

}  // namespace
}  // namespace lossd::train_lm::corpus_test
