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
       .available_bytes = 500},
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
       .available_bytes = 100},
      {.name = "Version1OfTheGroupAndThoseAbove",
       .files = {{"proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n3:memory:/docker/abc\n0::/\n"},
                 {"sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "1000\n"},
                 {"sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "900\n"},
                 {"sys/fs/cgroup/memory/docker/abc/memory.stat",
                  "inactive_file 1\ntotal_inactive_file 300\n"},
                 {"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
                 {"sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n"}},
       .limit_bytes = 1000,
       .available_bytes = 400},
      // Without a namespace the path is the host's, which the container does not see: its own group is
      // mounted.
      {.name = "Version1InAContainer",
       .files = {{"proc/self/cgroup", "3:memory:/kubepods/pod1/abc\n"},
                 {"sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"},
                 {"sys/fs/cgroup/memory/memory.usage_in_bytes", "250\n"}},
       .limit_bytes = 1000,
       .available_bytes = 750},
      {.name = "MoreUsedThanAllowedIsNoRoom",
       .files = {{"proc/self/cgroup", "0::/\n"},
                 {"sys/fs/cgroup/memory.max", "1000\n"},
                 {"sys/fs/cgroup/memory.current", "1200\n"}},
       .limit_bytes = 1000,
       .available_bytes = 0},
      {.name = "APathOutOfTheMountIsNotFollowed",
       .files = {{"proc/self/cgroup", "0::/../../memory\n"},
                 {"sys/fs/memory/memory.max", "10\n"},
                 {"sys/fs/cgroup/memory.max", "1000\n"}},
       .limit_bytes = 1000,
       .available_bytes = 1000},
  };
}

class ControlGroup : public ::testing::TestWithParam<System> {};

TEST_P(ControlGroup, AllowsWhatTheFilesSay) {
  const CheckpointFolder root;
  for (const auto& [path, text] : GetParam().files) {
    std::filesystem::create_directories((root / path).parent_path());
    CheckpointFolder::Write(root / path, text);
  }
  const ControlGroupMemory memory = ReadControlGroupMemory(root.path());
  EXPECT_EQ(memory.limit_bytes, GetParam().limit_bytes);
  EXPECT_EQ(memory.available_bytes, GetParam().available_bytes);
}

INSTANTIATE_TEST_SUITE_P(All, ControlGroup, ::testing::ValuesIn(Systems()),
                         [](const auto& system) { return system.param.name; });

}  // namespace
}  // namespace lossd::engine::control_group_test
