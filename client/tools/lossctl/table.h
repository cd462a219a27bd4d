// Plain-text tables for people: columns as wide as their widest cell, numbers to the right.
#ifndef LOSSD_CLIENT_TOOLS_LOSSCTL_TABLE_H_
#define LOSSD_CLIENT_TOOLS_LOSSCTL_TABLE_H_

#include <string>
#include <vector>

namespace lossd::tools {

enum class Align { kLeft, kRight };

class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };
  explicit Table(std::vector<Column> columns);

  // As many cells as columns; UTF-8, one terminal cell a character.
  void AddRow(std::vector<std::string> cells);
  // Header and rows, each ending with a newline, without trailing blanks.
  std::string Render() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_LOSSCTL_TABLE_H_
