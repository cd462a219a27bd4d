// Runs another program as a filter.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_FILTER_PROCESS_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_FILTER_PROCESS_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace lossd::train_lm {

// Starts command[0] with the rest as its arguments, writes `input` to its standard input, closes that, and
// returns what it writes to its standard output until it ends. The program must read all of its input before
// it writes. INTERNAL if it cannot be started, is killed, or writes nothing.
absl::StatusOr<std::string> RunFilter(const std::vector<std::string>& command, std::string_view input);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_FILTER_PROCESS_H_
