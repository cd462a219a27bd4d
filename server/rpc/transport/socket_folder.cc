#include "server/rpc/transport/socket_folder.h"

#include <sys/un.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace lossd::rpc {

absl::StatusOr<std::string> MakeSocketFolder(absl::string_view prefix, absl::string_view socket_name) {
  constexpr size_t kMost = sizeof(sockaddr_un::sun_path) - 1;
  std::string reasons;
  for (const char* const place : {"TMPDIR", "RUNTIME_DIRECTORY", "/tmp"}) {
    const char* const value = *place == '/' ? place : std::getenv(place);
    if (value == nullptr || *value == '\0') continue;
    std::error_code error;
    std::string made = (std::filesystem::absolute(value, error) / absl::StrCat(prefix, "-XXXXXX")).string();
    const size_t bytes = made.size() + 1 + socket_name.size();
    if (bytes <= kMost && mkdtemp(made.data()) != nullptr) return made;
    const std::string reason = bytes > kMost ? absl::StrCat("too long by ", bytes - kMost, " bytes")
                                             : std::generic_category().message(errno);
    absl::StrAppend(&reasons, reasons.empty() ? "" : ", ", place, ": ", reason);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("there is no folder for the socket ", socket_name, " (", reasons,
                   "): set TMPDIR to a folder with a short path that this process can write to"));
}

}  // namespace lossd::rpc
