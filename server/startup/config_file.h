// The configuration file: flags by their names, and heads.
#ifndef LOSSD_SERVER_STARTUP_CONFIG_FILE_H_
#define LOSSD_SERVER_STARTUP_CONFIG_FILE_H_

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/startup/head_entry.h"

namespace lossd {

// Sets the flags that the file names, and returns its heads. INVALID_ARGUMENT naming --config and the key: of
// a file that cannot be read or is no JSON object, a key that is there twice, a flag that does not exist, and
// a value that is none for it.
absl::StatusOr<std::vector<HeadEntry>> ReadConfigFile(const std::string& path);

// The same of the file's content; `path` is for messages. A flag that is there is whatever `set_flag` takes.
using ConfigFlag = absl::FunctionRef<absl::Status(const std::string& name, const nlohmann::json& value)>;
absl::StatusOr<std::vector<HeadEntry>> ParseConfig(absl::string_view text, const std::string& path,
                                                   ConfigFlag set_flag);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_CONFIG_FILE_H_
