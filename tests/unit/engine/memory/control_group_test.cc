#include "server/engine/memory/control_group.h"

#include <filesystem>
#include <limits>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"

namespace lossd::engine::control_group_test {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// The files of a system by their paths, and what they allow.
struct System {
  std::string name;
  std::map<std::string, std::string> files;
  int64_t limit_bytes = kNone;
  int64_t available_bytes = kNone;
  std::string tightest = {};
};

std::ostream& operator<<(std::ostream& out, const System& system) { return out << system.name; }

std::vector<System> Systems() {
  return {
      {.name = "NoFilesAreNoLimit", .files = {}},
      // With a namespace of its own, as containers have: the group is the root of the mount.
      {.name = "Version2InAContainer",
       .files = {{"proc/self/cgroup", "0::/\n"},
                 {"sys/fs/cgroup/memory.max", "1000\n"},
                 {"sys/fs/cgroup/memory.current", "700\n"},
                 {"sys/fs/cgroup/memory.stat", "anon 400\ninactive_file 200\nactive_file 100\n"}},
       .limit_bytes = 1000,
       .available_bytes = 600,
       .tightest = "control group / (memory.max is 1000 bytes)"},
      // Files that were read twice, and the kernel's objects for them. Pages of tmpfs count as `file`, but
      // lie in the lists of anonymous memory: they go nowhere without swap.
      {.name = "Version2FullOfPageCache",
       .files = {{"proc/self/cgroup", "0::/a\n"},
                 {"sys/fs/cgroup/a/memory.max", "1000\n"},
                 {"sys/fs/cgroup/a/memory.high", "max\n"},
                 {"sys/fs/cgroup/a/memory.current", "1000\n"},
                 {"sys/fs/cgroup/a/memory.stat",
                  "anon 50\nfile 900\nfile_mapped 9\nshmem 150\ninactive_anon 150\nactive_anon 50\n"
                  "inactive_file 10\nactive_file 740\nunevictable 0\nslab_reclaimable 40\n"
                  "slab_unreclaimable 10\nslab 50\n"}},
       .limit_bytes = 1000,
       .available_bytes = 790,
       .tightest = "control group /a (memory.max is 1000 bytes)"},
      {.name = "Version2IsSlowedDownBeforeItsLimit",
       .files = {{"proc/self/cgroup", "0::/a\n"},
                 {"sys/fs/cgroup/a/memory.max", "max\n"},
                 {"sys/fs/cgroup/a/memory.high", "800\n"},
                 {"sys/fs/cgroup/a/memory.current", "700\n"},
                 {"sys/fs/cgroup/a/memory.stat", "active_file 100\n"}},
       .limit_bytes = 800,
       .available_bytes = 200,
       .tightest = "control group /a (memory.high is 800 bytes)"},
      {.name = "MoreReclaimableThanUsedIsTheLimit",  // the files are not of one moment
       .files = {{"proc/self/cgroup", "0::/\n"},
                 {"sys/fs/cgroup/memory.max", "1000\n"},
                 {"sys/fs/cgroup/memory.current", "100\n"},
                 {"sys/fs/cgroup/memory.stat", "active_file 150\n"}},
       .limit_bytes = 1000,
       .available_bytes = 1000,
       .tightest = "control group / (memory.max is 1000 bytes)"},
      {.name = "Version2WithoutLimit",
       .files = {{"proc/self/cgroup", "0::/user.slice\n"},
                 {"sys/fs/cgroup/user.slice/memory.max", "max\n"},
                 {"sys/fs/cgroup/user.slice/memory.current", "700\n"}}},
      // A service of systemd, and the slice above it: the smallest limit and the smallest room, which may be
      // of different groups.
      {.name = "Version2OfTheGroupAndThoseAbove",
       .files = {{"proc/self/cgroup", "0::/system.slice/lossd.service\n"},
                 {"sys/fs/cgroup/system.slice/lossd.service/memory.max", "1000\n"},
                 {"sys/fs/cgroup/system.slice/lossd.service/memory.current", "100\n"},
                 {"sys/fs/cgroup/system.slice/memory.max", "2000\n"},
                 {"sys/fs/cgroup/system.slice/memory.current", "1900\n"}},
       .limit_bytes = 1000,
       .available_bytes = 100,
       .tightest = "control group /system.slice (memory.max is 2000 bytes)"},
      {.name = "Version1OfTheGroupAndThoseAbove",
       .files = {{"proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n3:memory:/docker/abc\n0::/\n"},
                 {"sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "1000\n"},
                 {"sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "900\n"},
                 {"sys/fs/cgroup/memory/docker/abc/memory.stat",
                  "inactive_file 1\nactive_file 2\nshmem 4\ntotal_cache 600\ntotal_inactive_file 300\n"
                  "total_active_file 200\n"},
                 {"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
                 {"sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n"}},
       .limit_bytes = 1000,
       .available_bytes = 600,
       .tightest = "control group /docker/abc (memory.limit_in_bytes is 1000 bytes)"},
      // 300 bytes of the group are in swap.
      {.name = "Version1OfMemoryAndSwapTogether",
       .files = {{"proc/self/cgroup", "3:memory:/a\n"},
                 {"sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n"},
                 {"sys/fs/cgroup/memory/a/memory.usage_in_bytes", "600\n"},
                 {"sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes", "1000\n"},
                 {"sys/fs/cgroup/memory/a/memory.memsw.usage_in_bytes", "900\n"},
                 {"sys/fs/cgroup/memory/a/memory.stat", "total_active_file 100\n"}},
       .limit_bytes = 1000,
       .available_bytes = 200,
       .tightest = "control group /a (memory.memsw.limit_in_bytes is 1000 bytes)"},
      // Without a namespace the path is the host's, which the container does not see: its own group is
      // mounted.
      {.name = "Version1InAContainer",
       .files = {{"proc/self/cgroup", "3:memory:/kubepods/pod1/abc\n"},
                 {"sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"},
                 {"sys/fs/cgroup/memory/memory.usage_in_bytes", "250\n"}},
       .limit_bytes = 1000,
       .available_bytes = 750,
       .tightest = "control group / (memory.limit_in_bytes is 1000 bytes)"},
      {.name = "MoreUsedThanAllowedIsNoRoom",
       .files = {{"proc/self/cgroup", "0::/\n"},
                 {"sys/fs/cgroup/memory.max", "1000\n"},
                 {"sys/fs/cgroup/memory.current", "1200\n"}},
       .limit_bytes = 1000,
       .available_bytes = 0,
       .tightest = "control group / (memory.max is 1000 bytes)"},
      {.name = "APathOutOfTheMountIsNotFollowed",
       .files = {{"proc/self/cgroup", "0::/../../memory\n"},
                 {"sys/fs/memory/memory.max", "10\n"},
                 {"sys/fs/cgroup/memory.max", "1000\n"}},
       .limit_bytes = 1000,
       .available_bytes = 1000,
       .tightest = "control group / (memory.max is 1000 bytes)"},
  };
}

void Lay(const std::map<std::string, std::string>& files, const CheckpointFolder& root) {
  for (const auto& [path, text] : files) {
    std::filesystem::create_directories((root / path).parent_path());
    CheckpointFolder::Write(root / path, text);
  }
}

class ControlGroup : public ::testing::TestWithParam<System> {};

TEST_P(ControlGroup, AllowsWhatTheFilesSay) {
  const CheckpointFolder root;
  Lay(GetParam().files, root);
  const ControlGroupMemory memory = ReadControlGroupMemory(root.path());
  EXPECT_EQ(memory.limit_bytes, GetParam().limit_bytes);
  EXPECT_EQ(memory.available_bytes, GetParam().available_bytes);
  EXPECT_EQ(memory.tightest, GetParam().tightest);
}

INSTANTIATE_TEST_SUITE_P(All, ControlGroup, ::testing::ValuesIn(Systems()),
                         [](const auto& system) { return system.param.name; });

struct Quota {
  std::string name;
  std::map<std::string, std::string> files;
  double processors = std::numeric_limits<double>::infinity();
};

std::ostream& operator<<(std::ostream& out, const Quota& quota) { return out << quota.name; }

std::vector<Quota> Quotas() {
  return {
      {.name = "NoFiles", .files = {}},
      {.name = "Version2WithoutQuota",
       .files = {{"proc/self/cgroup", "0::/\n"}, {"sys/fs/cgroup/cpu.max", "max 100000\n"}}},
      {.name = "Version2OfTheGroupAndThoseAbove",
       .files = {{"proc/self/cgroup", "0::/a/b\n"},
                 {"sys/fs/cgroup/a/b/cpu.max", "400000 100000\n"},
                 {"sys/fs/cgroup/a/cpu.max", "75000 50000\n"}},
       .processors = 1.5},
      {.name = "Version1",
       .files = {{"proc/self/cgroup", "3:memory:/m\n2:cpu,cpuacct:/a\n0::/\n"},
                 {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "50000\n"},
                 {"sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"},
                 {"sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"},
                 {"sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}},
       .processors = 0.5},
  };
}

class ControlGroupQuota : public ::testing::TestWithParam<Quota> {};

TEST_P(ControlGroupQuota, AmountsToProcessors) {
  const CheckpointFolder root;
  Lay(GetParam().files, root);
  EXPECT_EQ(ReadControlGroupProcessors(root.path()), GetParam().processors);
}

INSTANTIATE_TEST_SUITE_P(All, ControlGroupQuota, ::testing::ValuesIn(Quotas()),
                         [](const auto& quota) { return quota.param.name; });

}  // namespace
}  // namespace lossd::engine::control_group_test
