#include "server/engine/memory/control_group.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace lossd::engine {
namespace {

// How a version of control groups lays out its files.
struct Layout {
  absl::string_view mount;
  absl::string_view limit;
  absl::string_view usage;
  absl::string_view droppable;  // the line of memory.stat with the file pages that nobody used lately
};
constexpr Layout kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                              "total_inactive_file "};
constexpr Layout kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "};

// The group of this process, as a path below the mount.
struct Membership {
  Layout layout = kVersion2;
  std::string path;
};

// A line of /proc/self/cgroup is ID:CONTROLLERS:PATH, of version 2 "0::PATH". Where both versions are
// mounted, memory is a controller of version 1 if it has a line there.
Membership ReadMembership(const std::string& root) {
  Membership found;
  std::ifstream file(absl::StrCat(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(fields[1], ',');
    if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      return {kVersion1, fields[2]};
    }
    if (fields[0] == "0") found.path = fields[2];
  }
  return found;
}

// A file of one number; nothing if it is not there or says "max".
std::optional<int64_t> ReadNumber(const std::string& file) {
  std::ifstream stream(file);
  std::string text;
  int64_t value = 0;
  if (!std::getline(stream, text) || !absl::SimpleAtoi(text, &value)) return std::nullopt;
  return value;
}

int64_t ReadDroppable(const std::string& file, absl::string_view name) {
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {
    absl::string_view text = line;
    int64_t value = 0;
    if (absl::ConsumePrefix(&text, name) && absl::SimpleAtoi(text, &value)) return value;
  }
  return 0;
}

void Tighten(const Layout& layout, const std::string& folder, ControlGroupMemory& memory) {
  const std::optional<int64_t> limit = ReadNumber(absl::StrCat(folder, "/", layout.limit));
  if (!limit.has_value()) return;
  memory.limit_bytes = std::min(memory.limit_bytes, *limit);
  const int64_t used = ReadNumber(absl::StrCat(folder, "/", layout.usage)).value_or(0);
  const int64_t droppable = ReadDroppable(absl::StrCat(folder, "/memory.stat"), layout.droppable);
  const int64_t kept = std::max<int64_t>(used - droppable, 0);
  memory.available_bytes = std::min(memory.available_bytes, std::max<int64_t>(*limit - kept, 0));
}

}  // namespace

ControlGroupMemory ReadControlGroupMemory(const std::string& root) {
  const Membership member = ReadMembership(root);
  ControlGroupMemory memory;
  // In a container the path may be the host's, and lead nowhere below the mount: the mount itself is then the
  // container's group.
  std::string path = absl::StrContains(member.path, "..") ? "" : member.path;
  while (true) {
    while (absl::EndsWith(path, "/")) path.pop_back();
    Tighten(member.layout, absl::StrCat(root, member.layout.mount, path), memory);
    if (path.empty()) return memory;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace lossd::engine
