#include "server/startup/group/ending_processes.h"

#include <signal.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace lossd {
namespace {

using Fields = std::map<std::string, std::string>;

// Empty if there is no such process.
Fields ReadStatus(const std::filesystem::path& process) {
  Fields fields;
  std::ifstream file(process / "status");
  for (std::string line; std::getline(file, line);) {
    const std::pair<std::string, std::string> field = absl::StrSplit(line, absl::MaxSplits(':', 1));
    fields[field.first] = std::string(absl::StripAsciiWhitespace(field.second));
  }
  return fields;
}

// The kernel tells its flags in the seventh field behind the name.
bool IsExiting(const std::filesystem::path& process) {
  constexpr uint64_t kExiting = 4;  // the kernel's PF_EXITING
  std::ifstream file(process / "stat");
  std::string line;
  std::getline(file, line);
  const size_t name = line.rfind(')');
  if (name == std::string::npos) return false;
  const std::vector<absl::string_view> fields = absl::StrSplit(absl::string_view(line).substr(name), ' ');
  uint64_t flags = 0;
  return fields.size() > 7 && absl::SimpleAtoi(fields[7], &flags) && (flags & kExiting) != 0;
}

bool IsToBeKilled(Fields& status) {
  constexpr uint64_t kKill = uint64_t{1} << (SIGKILL - 1);
  for (const char* pending : {"SigPnd", "ShdPnd"}) {
    uint64_t signals = 0;
    if (absl::SimpleHexAtoi(status[pending], &signals) && (signals & kKill) != 0) return true;
  }
  return false;
}

// Nothing is left of it but its status; of one whose first thread alone has ended there is more.
bool IsGone(Fields& status) {
  int threads = 0;
  const bool ended = absl::StartsWith(status["State"], "Z") || absl::StartsWith(status["State"], "X");
  return ended && absl::SimpleAtoi(status["Threads"], &threads) && threads <= 1;
}

}  // namespace

bool HasBegunToEnd(pid_t pid) { return IsExiting(absl::StrCat("/proc/", pid)); }

std::vector<pid_t> EndingProcesses(const std::filesystem::path& proc) {
  std::vector<pid_t> ending;
  Fields own = ReadStatus(proc / "self");
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(proc, error)) {
    pid_t pid = 0;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &pid)) continue;
    Fields status = ReadStatus(entry.path());
    if (status["Name"] != own["Name"] || status["Uid"] != own["Uid"] || status["Pid"] == own["Pid"]) continue;
    if (!IsGone(status) && (IsToBeKilled(status) || IsExiting(entry.path()))) ending.push_back(pid);
  }
  return ending;
}

}  // namespace lossd
