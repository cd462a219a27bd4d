// Tables drawn with '|', '+' and '-', as plain-text manuals have them: a cell that was wrapped over several
// lines is put together again, so that words of neighbouring columns do not alternate in the running text.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_TEXT_TABLE_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_TEXT_TABLE_H_

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lossd::train_lm {

// Lines are given without white space around them. A border opens and closes a table: "+-----+".
bool IsTableBorder(std::string_view line);

// One string per row of the table whose lines these are (without the two borders), cells joined by " | ".
// Columns are where the rulers between rows ("|---+---|") have their crosses. UTF-8; a line that does not fit
// the columns becomes a row of its own.
std::vector<std::string> TableRows(std::span<const std::string> lines);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_TEXT_TABLE_H_
