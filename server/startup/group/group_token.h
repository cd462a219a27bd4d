// --group_token_file.
#ifndef LOSSD_SERVER_STARTUP_GROUP_GROUP_TOKEN_H_
#define LOSSD_SERVER_STARTUP_GROUP_GROUP_TOKEN_H_

#include <string>

#include "absl/status/statusor.h"

namespace lossd {

// The file's text without white space around it. INVALID_ARGUMENT, which never quotes it and says how to mend
// it: a file that cannot be read, that every user of this machine can read, or that holds less than 16 bytes
// or more than a line.
absl::StatusOr<std::string> ReadGroupToken(const std::string& path);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_GROUP_TOKEN_H_
