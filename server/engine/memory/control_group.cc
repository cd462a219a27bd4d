#include "server/engine/memory/control_group.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace lossd::engine {
namespace {

// Files that hold a limit and the usage that it bounds.
struct Bound {
  absl::string_view limit;
  absl::string_view usage;
};

// How a version of control groups lays out its files.
struct Layout {
  absl::string_view mount;
  std::array<Bound, 2> bounds;
  // The lines of memory.stat that the kernel can reclaim. The pages of tmpfs are in none of them: they lie in
  // the lists of anonymous memory.
  std::array<absl::string_view, 3> reclaimable;
};
// The second bound is of memory and swap together. The statistics of version 1 do not tell its slabs.
constexpr Layout kVersion1 = {"/sys/fs/cgroup/memory",
                              {{{"memory.limit_in_bytes", "memory.usage_in_bytes"},
                                {"memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"}}},
                              {"total_inactive_file", "total_active_file", ""}};
// Above memory.high the kernel slows the group down almost to a standstill.
constexpr Layout kVersion2 = {"/sys/fs/cgroup",
                              {{{"memory.max", "memory.current"}, {"memory.high", "memory.current"}}},
                              {"inactive_file", "active_file", "slab_reclaimable"}};

enum class Version { k1, k2 };

// The group of this process, as a path below the mount.
struct Membership {
  Version version = Version::k2;
  std::string path;
};

// A line of /proc/self/cgroup is ID:CONTROLLERS:PATH, of version 2 "0::PATH". Where both versions are
// mounted, a controller is of version 1 if it has a line there.
Membership ReadMembership(const std::string& root, absl::string_view controller) {
  Membership found;
  std::ifstream file(absl::StrCat(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(fields[1], ',');
    if (absl::c_linear_search(controllers, controller)) return {Version::k1, fields[2]};
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

int64_t ReadReclaimable(const std::string& file, const Layout& layout) {
  std::ifstream stream(file);
  int64_t sum = 0;
  for (std::string line; std::getline(stream, line);) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ');
    int64_t value = 0;
    if (fields.size() != 2 || !absl::SimpleAtoi(fields[1], &value)) continue;
    if (absl::c_linear_search(layout.reclaimable, fields[0])) sum += value;
  }
  return sum;
}

// `path`: of the group, below the mount at `mount`.
void Tighten(const Layout& layout, const std::string& mount, const std::string& path,
             ControlGroupMemory& memory) {
  const std::string folder = absl::StrCat(mount, path, "/");
  for (const Bound& bound : layout.bounds) {
    const std::optional<int64_t> limit = ReadNumber(absl::StrCat(folder, bound.limit));
    if (!limit.has_value()) continue;
    memory.limit_bytes = std::min(memory.limit_bytes, *limit);
    const int64_t used = ReadNumber(absl::StrCat(folder, bound.usage)).value_or(0);
    const int64_t reclaimable = ReadReclaimable(absl::StrCat(folder, "memory.stat"), layout);
    const int64_t available = std::max<int64_t>(*limit - std::max<int64_t>(used - reclaimable, 0), 0);
    if (available >= memory.available_bytes) continue;
    memory.available_bytes = available;
    memory.tightest = absl::StrCat("control group ", path.empty() ? "/" : path, " (", bound.limit, " is ",
                                   *limit, " bytes)");
  }
}

// cpu.max of version 2 is "QUOTA PERIOD", in microseconds. Version 1 has a file for each, and -1 for no
// quota.
double ReadProcessors(Version version, const std::string& folder) {
  int64_t quota = 0;
  int64_t period = 0;
  if (version == Version::k1) {
    quota = ReadNumber(absl::StrCat(folder, "/cpu.cfs_quota_us")).value_or(0);
    period = ReadNumber(absl::StrCat(folder, "/cpu.cfs_period_us")).value_or(0);
  } else {
    std::ifstream(absl::StrCat(folder, "/cpu.max")) >> quota >> period;  // both are 0 after "max"
  }
  if (quota <= 0 || period <= 0) return std::numeric_limits<double>::infinity();
  return static_cast<double>(quota) / static_cast<double>(period);
}

// Calls visit(path) for the group and those above it, up to the mount.
template <typename Visit>
void ForEachGroup(const Membership& member, const Visit& visit) {
  // In a container the path may be the host's, and lead nowhere below the mount: the mount itself is then the
  // container's group.
  std::string path = absl::StrContains(member.path, "..") ? "" : member.path;
  while (true) {
    while (absl::EndsWith(path, "/")) path.pop_back();
    visit(path);
    if (path.empty()) return;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace

ControlGroupMemory ReadControlGroupMemory(const std::string& root) {
  const Membership member = ReadMembership(root, "memory");
  const Layout& layout = member.version == Version::k1 ? kVersion1 : kVersion2;
  ControlGroupMemory memory;
  ForEachGroup(member, [&](const std::string& path) {
    Tighten(layout, absl::StrCat(root, layout.mount), path, memory);
  });
  return memory;
}

double ReadControlGroupProcessors(const std::string& root) {
  const Membership member = ReadMembership(root, "cpu");
  const absl::string_view mount = member.version == Version::k1 ? "/sys/fs/cgroup/cpu" : "/sys/fs/cgroup";
  double processors = std::numeric_limits<double>::infinity();
  ForEachGroup(member, [&](const std::string& path) {
    processors = std::min(processors, ReadProcessors(member.version, absl::StrCat(root, mount, path)));
  });
  return processors;
}

}  // namespace lossd::engine
