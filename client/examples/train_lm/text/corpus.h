// Plain-text documents as chapters of paragraphs.
//
// Chapters are found by the headings of two layouts: the text output of DocBook ("Chapter 3. Title",
// "Appendix A. Title" at the start of a line) and of Sphinx ("3. Title" underlined with a row of '*'). What
// stands before the first heading (title page, table of contents) becomes a chapter marked as front matter.
// Any other text, or one whose chapters are too coarse to hold one out, is cut into kBlocks runs of whole
// paragraphs of about equal size, which then play the part of chapters.
//
// A paragraph is a run of non-blank lines joined by single spaces, or one row of a table. Lines of nothing
// but ruling (underlines, borders) are layout and are left out.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_CORPUS_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_CORPUS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace lossd::train_lm {

enum class ChapterKind { kBody, kFrontMatter };

struct Chapter {
  std::string title;
  ChapterKind kind = ChapterKind::kBody;
  std::vector<std::string> paragraphs;

  int64_t Bytes() const;
};

struct Document {
  std::string name;  // file name without its folder
  std::vector<Chapter> chapters;

  int64_t Bytes() const;
};

// One chapter in about this many is held out (split.h), so this is also the number of blocks of a text
// without chapters.
inline constexpr int64_t kBlocks = 16;

// Never fails: any text has at least one chapter unless it is blank.
Document ParseDocument(std::string name, std::string_view text);

// Reads a plain or gzip-compressed UTF-8 file. NOT_FOUND, or INVALID_ARGUMENT for a damaged or blank file.
absl::StatusOr<Document> ReadDocument(const std::string& path);

// The manuals that are read when no --text is given. `directory` empty: where Debian and Ubuntu install them;
// otherwise the folder that holds all three files.
std::vector<std::string> DefaultTextFiles(const std::string& directory);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_CORPUS_H_
