#include "client/examples/train_lm/text/text_table.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace lossd::train_lm {
namespace {

bool IsRuler(std::string_view line) {
  return line.size() >= 3 && line.starts_with("|-") && line.ends_with("-|") &&
         std::ranges::all_of(line.substr(1, line.size() - 2), [](char c) { return c == '-' || c == '+'; });
}

// Character positions of the crosses of all rulers; a table without rulers has one column.
std::vector<size_t> Crosses(std::span<const std::string> lines) {
  std::vector<size_t> crosses;
  for (const std::string& line : lines) {
    if (!IsRuler(line)) continue;
    for (size_t i = 0; i < line.size(); ++i) {
      if (line[i] == '+') crosses.push_back(i);
    }
  }
  std::ranges::sort(crosses);
  crosses.erase(std::unique(crosses.begin(), crosses.end()), crosses.end());
  return crosses;
}

bool ContinuesCharacter(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

// The cells of one line, or nothing if its bars are not where the crosses are.
std::vector<std::string> Cells(const std::string& line, const std::vector<size_t>& crosses) {
  if (!line.starts_with('|') || !line.ends_with('|')) return {};
  std::vector<std::string> cells(1);
  size_t character = 0;
  auto cross = crosses.begin();
  for (size_t i = 1; i + 1 < line.size(); ++i) {
    if (!ContinuesCharacter(line[i])) ++character;
    if (cross != crosses.end() && character == *cross) {
      if (line[i] != '|') return {};
      cells.emplace_back();
      ++cross;
    } else {
      cells.back().push_back(line[i]);
    }
  }
  if (cross != crosses.end()) return {};
  for (std::string& cell : cells) absl::StripAsciiWhitespace(&cell);
  return cells;
}

}  // namespace

bool IsTableBorder(std::string_view line) {
  return line.size() >= 3 && line.starts_with("+-") && line.ends_with("-+") &&
         std::ranges::all_of(line, [](char c) { return c == '-' || c == '+'; });
}

std::vector<std::string> TableRows(std::span<const std::string> lines) {
  const std::vector<size_t> crosses = Crosses(lines);
  std::vector<std::string> rows;
  std::vector<std::string> open;  // cells of the row being read
  const auto close = [&] {
    if (!open.empty()) rows.push_back(absl::StrJoin(open, " | "));
    open.clear();
  };
  for (const std::string& line : lines) {
    if (IsRuler(line)) {
      close();
      continue;
    }
    std::vector<std::string> cells = Cells(line, crosses);
    if (cells.empty()) {
      close();
      rows.push_back(line);
    } else if (open.empty()) {
      open = std::move(cells);
    } else {
      for (size_t i = 0; i < open.size(); ++i) {
        if (!cells[i].empty()) absl::StrAppend(&open[i], open[i].empty() ? "" : " ", cells[i]);
      }
    }
  }
  close();
  return rows;
}

}  // namespace lossd::train_lm
