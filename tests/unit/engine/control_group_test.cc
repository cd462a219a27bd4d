#include "server/engine/control_group.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace lossd::engine::control_group_test {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// The files of a system, below a folder of its own.
class ControlGroup : public ::testing::Test {
 protected:
  ControlGroup() : root_(std::filesystem::path(::testing::TempDir()) / "control_group") {
    std::filesystem::remove_all(root_);
  }
  ~ControlGroup() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  ControlGroupMemory Read() const { return ReadControlGroupMemory(root_.string()); }

 private:
  const std::filesystem::path root_;
};

TEST_F(ControlGroup, NoFilesAreNoLimit) {
  EXPECT_EQ(Read().limit_bytes, kNone);
  EXPECT_EQ(Read().available_bytes, kNone);
}

// With a namespace of its own, as containers have: the group is the root of the mount.
TEST_F(ControlGroup, Version2InAContainer) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "1000\n");
  Write("sys/fs/cgroup/memory.current", "700\n");
  Write("sys/fs/cgroup/memory.stat", "anon 400\ninactive_file 200\nactive_file 100\n");
  EXPECT_EQ(Read().limit_bytes, 1000);
  EXPECT_EQ(Read().available_bytes, 500);
}

TEST_F(ControlGroup, Version2WithoutLimit) {
  Write("proc/self/cgroup", "0::/user.slice\n");
  Write("sys/fs/cgroup/user.slice/memory.max", "max\n");
  Write("sys/fs/cgroup/user.slice/memory.current", "700\n");
  EXPECT_EQ(Read().limit_bytes, kNone);
  EXPECT_EQ(Read().available_bytes, kNone);
}

// A service of systemd, and the slice above it: the smallest limit and the smallest room, which may be of
// different groups.
TEST_F(ControlGroup, Version2OfTheGroupAndThoseAbove) {
  Write("proc/self/cgroup", "0::/system.slice/lossd.service\n");
  Write("sys/fs/cgroup/system.slice/lossd.service/memory.max", "1000\n");
  Write("sys/fs/cgroup/system.slice/lossd.service/memory.current", "100\n");
  Write("sys/fs/cgroup/system.slice/memory.max", "2000\n");
  Write("sys/fs/cgroup/system.slice/memory.current", "1900\n");
  EXPECT_EQ(Read().limit_bytes, 1000);
  EXPECT_EQ(Read().available_bytes, 100);
}

TEST_F(ControlGroup, Version1OfTheGroupAndThoseAbove) {
  Write("proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n3:memory:/docker/abc\n0::/\n");
  Write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "1000\n");
  Write("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "900\n");
  Write("sys/fs/cgroup/memory/docker/abc/memory.stat", "inactive_file 1\ntotal_inactive_file 300\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n");
  EXPECT_EQ(Read().limit_bytes, 1000);
  EXPECT_EQ(Read().available_bytes, 400);
}

// Without a namespace the path is the host's, which the container does not see: its own group is mounted.
TEST_F(ControlGroup, Version1InAContainer) {
  Write("proc/self/cgroup", "3:memory:/kubepods/pod1/abc\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "250\n");
  EXPECT_EQ(Read().limit_bytes, 1000);
  EXPECT_EQ(Read().available_bytes, 750);
}

TEST_F(ControlGroup, MoreUsedThanAllowedIsNoRoom) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "1000\n");
  Write("sys/fs/cgroup/memory.current", "1200\n");
  EXPECT_EQ(Read().available_bytes, 0);
}

TEST_F(ControlGroup, APathOutOfTheMountIsNotFollowed) {
  Write("proc/self/cgroup", "0::/../../memory\n");
  Write("sys/fs/memory/memory.max", "10\n");
  Write("sys/fs/cgroup/memory.max", "1000\n");
  EXPECT_EQ(Read().limit_bytes, 1000);
}

}  // namespace
}  // namespace lossd::engine::control_group_test
