#include "client/examples/train_lm/text/corpus.h"

#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/examples/train_lm/text/text_table.h"

namespace lossd::train_lm {
namespace {

constexpr size_t kReadBytes = 1 << 20;
// A chapter that is held out must be within these shares of its document, or the document is cut into blocks.
constexpr double kSmallestShare = 1.0 / 40;
constexpr double kLargestShare = 1.0 / 8;

bool IsRuling(std::string_view line) {
  if (line.size() < 3) return false;
  return std::ranges::all_of(
      line, [](char c) { return std::string_view("*=-_~+| \"^").find(c) != std::string_view::npos; });
}

bool IsUnderline(std::string_view line) {
  return line.size() >= 3 && std::ranges::all_of(line, [](char c) { return c == '*'; });
}

// "12. Title", as Sphinx numbers chapters.
bool IsNumberedTitle(std::string_view line) {
  const size_t digits = static_cast<size_t>(
      std::ranges::find_if_not(line, [](char c) { return absl::ascii_isdigit(c); }) - line.begin());
  return digits > 0 && digits <= 3 && line.substr(digits, 2) == ". " && line.size() > digits + 2;
}

// "Chapter 3. Title" or "Appendix A. Title", as DocBook does.
bool IsNamedTitle(std::string_view line) {
  for (const std::string_view word : {"Chapter ", "Appendix "}) {
    if (!line.starts_with(word)) continue;
    line.remove_prefix(word.size());
    const size_t dot = line.find(". ");
    return dot != std::string_view::npos && dot >= 1 && dot <= 3 &&
           std::ranges::all_of(line.substr(0, dot), [](char c) { return absl::ascii_isalnum(c); });
  }
  return false;
}

std::vector<std::string> CleanLines(std::string_view text) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  // No-break spaces are typesetting; DocBook puts them into its headings.
  std::string plain(text);
  absl::StrReplaceAll({{"\r", ""}, {"\f", "\n"}, {"\t", " "}, {"\xC2\xA0", " "}}, &plain);
  std::vector<std::string> lines = absl::StrSplit(plain, '\n');
  for (std::string& line : lines) absl::StripTrailingAsciiWhitespace(&line);
  return lines;
}

// Index of the border that closes the table opened at `border`, or 0 if none does within the same paragraph.
size_t ClosingBorder(std::span<const std::string> lines, size_t border) {
  for (size_t i = border + 1; i < lines.size(); ++i) {
    const std::string line(absl::StripLeadingAsciiWhitespace(lines[i]));
    if (line.empty()) return 0;
    if (IsTableBorder(line)) return i;
  }
  return 0;
}

std::vector<std::string> TableParagraphs(std::span<const std::string> lines) {
  std::vector<std::string> inner;
  for (const std::string& line : lines) inner.emplace_back(absl::StripAsciiWhitespace(line));
  std::vector<std::string> rows = TableRows(inner);
  for (std::string& row : rows) absl::RemoveExtraAsciiWhitespace(&row);
  return rows;
}

std::vector<std::string> Paragraphs(std::span<const std::string> lines) {
  std::vector<std::string> paragraphs;
  bool open = false;
  for (size_t i = 0; i < lines.size(); ++i) {
    std::string words = lines[i];
    absl::RemoveExtraAsciiWhitespace(&words);
    const size_t table_end = IsTableBorder(words) ? ClosingBorder(lines, i) : 0;
    if (table_end > 0) {
      std::ranges::move(TableParagraphs(lines.subspan(i + 1, table_end - i - 1)),
                        std::back_inserter(paragraphs));
      i = table_end;
      open = false;
    } else if (words.empty()) {
      open = false;
    } else if (!IsRuling(words)) {
      if (open) {
        absl::StrAppend(&paragraphs.back(), " ", words);
      } else {
        paragraphs.push_back(std::move(words));
      }
      open = true;
    }
  }
  return paragraphs;
}

std::vector<Chapter> ByHeadings(std::span<const std::string> lines) {
  std::vector<Chapter> chapters;
  size_t begin = 0;
  std::string title = "(front matter)";
  ChapterKind kind = ChapterKind::kFrontMatter;
  const auto close = [&](size_t end) {
    std::vector<std::string> paragraphs = Paragraphs(lines.subspan(begin, end - begin));
    if (!paragraphs.empty()) chapters.push_back({title, kind, std::move(paragraphs)});
  };
  for (size_t i = 0; i < lines.size(); ++i) {
    const bool sphinx = i + 1 < lines.size() && IsNumberedTitle(lines[i]) && IsUnderline(lines[i + 1]);
    if (!sphinx && !IsNamedTitle(lines[i])) continue;
    close(i);
    begin = i;
    title = lines[i];
    kind = ChapterKind::kBody;
  }
  close(lines.size());
  return chapters;
}

bool SomeChapterCanBeHeldOut(const Document& document) {
  const double bytes = static_cast<double>(document.Bytes());
  return std::ranges::any_of(document.chapters, [&](const Chapter& chapter) {
    const double share = static_cast<double>(chapter.Bytes()) / bytes;
    return chapter.kind == ChapterKind::kBody && share >= kSmallestShare && share <= kLargestShare;
  });
}

std::vector<Chapter> EqualBlocks(std::vector<std::string> paragraphs) {
  Chapter whole{.title = "", .paragraphs = std::move(paragraphs)};
  const int64_t total = whole.Bytes();
  std::vector<Chapter> blocks;
  int64_t done = 0;
  for (std::string& paragraph : whole.paragraphs) {
    if (blocks.empty() || done * kBlocks >= total * static_cast<int64_t>(blocks.size())) {
      blocks.push_back({.title = absl::StrCat("block ", blocks.size() + 1), .paragraphs = {}});
    }
    done += static_cast<int64_t>(paragraph.size());
    blocks.back().paragraphs.push_back(std::move(paragraph));
  }
  return blocks;
}

}  // namespace

int64_t Chapter::Bytes() const {
  return std::accumulate(
      paragraphs.begin(), paragraphs.end(), int64_t{0},
      [](int64_t sum, const std::string& p) { return sum + static_cast<int64_t>(p.size()); });
}

int64_t Document::Bytes() const {
  return std::accumulate(chapters.begin(), chapters.end(), int64_t{0},
                         [](int64_t sum, const Chapter& c) { return sum + c.Bytes(); });
}

Document ParseDocument(std::string name, std::string_view text) {
  const std::vector<std::string> lines = CleanLines(text);
  Document document{std::move(name), ByHeadings(lines)};
  if (!SomeChapterCanBeHeldOut(document)) document.chapters = EqualBlocks(Paragraphs(lines));
  return document;
}

absl::StatusOr<Document> ReadDocument(const std::string& path) {
  const std::unique_ptr<gzFile_s, decltype(&gzclose)> file(gzopen(path.c_str(), "rb"), &gzclose);
  if (file == nullptr) return absl::NotFoundError(absl::StrCat("cannot open ", path));
  std::string text;
  for (;;) {
    const size_t used = text.size();
    text.resize(used + kReadBytes);
    const int got = gzread(file.get(), text.data() + used, kReadBytes);
    if (got < 0) {
      int code = 0;
      return absl::InvalidArgumentError(absl::StrCat("cannot read ", path, ": ", gzerror(file.get(), &code)));
    }
    text.resize(used + static_cast<size_t>(got));
    if (got == 0) break;
  }
  Document document = ParseDocument(std::filesystem::path(path).filename().string(), text);
  if (document.Bytes() == 0) return absl::InvalidArgumentError(absl::StrCat("no text in ", path));
  return document;
}

std::vector<std::string> DefaultTextFiles(const std::string& directory) {
  std::vector<std::string> files = {"/usr/share/debian-reference/debian-reference.en.txt.gz",
                                    "/usr/share/doc/debian-policy/policy.txt.gz",
                                    "/usr/share/developers-reference/developers-reference.txt.gz"};
  if (directory.empty()) return files;
  for (std::string& file : files) {
    file = (std::filesystem::path(directory) / std::filesystem::path(file).filename()).string();
  }
  return files;
}

}  // namespace lossd::train_lm
