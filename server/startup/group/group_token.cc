#include "server/startup/group/group_token.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lossd {
namespace {

constexpr size_t kShortest = 16;
constexpr size_t kLongest = 1024;

}  // namespace

absl::StatusOr<std::string> ReadGroupToken(const std::string& path) {
  const auto invalid = [&path](const auto&... why) {
    return absl::InvalidArgumentError(absl::StrCat("--group_token_file: ", path, " ", why...));
  };
  struct stat status {};
  const bool there = stat(path.c_str(), &status) == 0;
  if (there && !S_ISREG(status.st_mode)) return invalid("is no file");  // to open a pipe may take for ever
  std::ifstream file(path);
  if (!there || !file) {
    return invalid("cannot be read: ", std::strerror(errno),
                   "; make it at one node, openssl rand -hex 32 > FILE, and copy it to the others");
  }
  if ((status.st_mode & S_IROTH) != 0) {
    return invalid(
        "can be read by every user of this machine; chmod o-r it (in Kubernetes, defaultMode: 0400 of "
        "the volume)");
  }
  std::string text(kLongest + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  const absl::string_view token = absl::StripAsciiWhitespace(text);
  if (token.size() < kShortest) {
    return invalid("holds ", token.size(), " bytes; it must be at least ", kShortest,
                   ": openssl rand -hex 32");
  }
  const bool visible = std::all_of(token.begin(), token.end(), absl::ascii_isgraph);
  if (text.size() > kLongest || !visible) {
    return invalid("must hold one word of at most ", kLongest,
                   " visible ASCII characters: openssl rand -hex 32");
  }
  return std::string(token);
}

}  // namespace lossd
