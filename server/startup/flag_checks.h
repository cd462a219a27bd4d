// What values of flags may be, and what is said of those that may not.
#ifndef LOSSD_SERVER_STARTUP_FLAG_CHECKS_H_
#define LOSSD_SERVER_STARTUP_FLAG_CHECKS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace lossd {

inline absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

inline absl::Status CheckAtLeast(const char* flag, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return Invalid(absl::StrCat("--", flag, " is ", value, "; it must be at least ", least));
}

inline absl::Status CheckDuration(const char* flag, absl::Duration value, absl::Duration least) {
  if (value >= least) return absl::OkStatus();
  return Invalid(absl::StrCat("--", flag, " is ", absl::FormatDuration(value), "; it must be at least ",
                              absl::FormatDuration(least)));
}

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_FLAG_CHECKS_H_
