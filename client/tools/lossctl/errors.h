// Errors of lossctl: exit codes for scripts, advice for people.
#ifndef LOSSD_CLIENT_TOOLS_LOSSCTL_ERRORS_H_
#define LOSSD_CLIENT_TOOLS_LOSSCTL_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::tools {

// Part of the interface: scripts depend on the numbers (docs/lossctl.md).
enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,       // anything not below
  kUsage = 2,        // the command line is wrong
  kNotFound = 3,     // no such head, file or tensor
  kUnreachable = 4,  // no server, or no answer in time
  kRefused = 5,      // the state of the server forbids it
  kExhausted = 6,    // out of memory at the server or of space here
  kInvalid = 7,      // a value or a file is not acceptable
};
ExitCode ExitCodeOf(const absl::Status& status);
// Shown at the end of --help.
std::string ExitCodesHelp();

// The error with what to do about it attached; an ok status, earlier advice and
// empty advice change nothing.
absl::Status WithAdvice(absl::Status status, absl::string_view advice);

// What helps when a head could not be created, or was not found; empty for other errors.
std::string CreateAdvice(const absl::Status& status);
std::string NotFoundAdvice(const absl::Status& status);

// "lossctl: ..." for people, one JSON object for programs; ends with a newline.
std::string FormatError(const absl::Status& status, bool json);
// The same for a command line that could not be parsed; `command` is how far it was understood.
std::string FormatUsageError(absl::string_view message, absl::string_view command, bool json);

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_LOSSCTL_ERRORS_H_
