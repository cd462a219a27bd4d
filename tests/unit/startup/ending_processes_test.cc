#include "server/startup/group/ending_processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/wait.h"

namespace lossd::ending_processes_test {
namespace {

using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

struct Process {
  std::string name = "lossd";
  std::string uid = "1000\t1000\t1000\t1000";
  std::string state = "R (running)";
  int threads = 3;
  std::string pending = "0000000000000000";         // of the first thread
  std::string shared_pending = "0000000000000000";  // of all of them
  std::string flags = "4194560";
};
constexpr const char* kKill = "0000000000000100";
constexpr const char* kExiting = "4194564";

// What the kernel tells, as far as it is looked at.
class Proc {
 public:
  Proc() : folder_((std::filesystem::temp_directory_path() / "proc-XXXXXX").string()) {
    if (mkdtemp(folder_.data()) == nullptr) std::abort();
    Add("self", "700", {});
    Add("700", "700", {.flags = kExiting});  // whatever it is, it is this one
    std::ofstream(path() / "uptime") << "1 1";
  }
  ~Proc() { std::filesystem::remove_all(folder_); }

  std::filesystem::path path() const { return folder_; }
  void Add(int pid, const Process& process) { Add(absl::StrCat(pid), absl::StrCat(pid), process); }

 private:
  void Add(const std::string& name, const std::string& pid, const Process& process) {
    std::filesystem::create_directory(path() / name);
    std::ofstream(path() / name / "status")
        << "Name:\t" << process.name << "\nUmask:\t0022\nState:\t" << process.state << "\nPid:\t" << pid
        << "\nUid:\t" << process.uid << "\nThreads:\t" << process.threads << "\nSigPnd:\t" << process.pending
        << "\nShdPnd:\t" << process.shared_pending << "\n";
    std::ofstream(path() / name / "stat")
        << pid << " (" << process.name << ") R 1 1 1 0 -1 " << process.flags << " 1 2 3\n";
  }

  std::string folder_;
};

TEST(EndingProcesses, AreThoseThatAreKilledOrExit) {
  Proc proc;
  proc.Add(1, {});
  proc.Add(2, {.shared_pending = kKill});
  proc.Add(3, {.pending = kKill});
  proc.Add(4, {.flags = kExiting});
  proc.Add(5, {.shared_pending = "0000000000004000"});  // SIGTERM
  EXPECT_THAT(EndingProcesses(proc.path()), UnorderedElementsAre(2, 3, 4));
}

TEST(EndingProcesses, AreNotThoseThatAreGoneOrOthers) {
  Proc proc;
  proc.Add(1, {.state = "Z (zombie)", .threads = 1, .flags = kExiting});
  proc.Add(2, {.state = "Z (zombie)", .threads = 2, .flags = kExiting});  // some of its threads are there
  proc.Add(3, {.name = "bash", .flags = kExiting});
  proc.Add(4, {.uid = "0\t0\t0\t0", .flags = kExiting});
  std::filesystem::create_directory(proc.path() / "5");  // gone while it is looked at
  EXPECT_THAT(EndingProcesses(proc.path()), UnorderedElementsAre(2));
  EXPECT_THAT(EndingProcesses(proc.path() / "nothing"), IsEmpty());
}

TEST(EndingProcesses, TheKernelTellsWhoHasBegunToEnd) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  EXPECT_FALSE(HasBegunToEnd(child));
  EXPECT_THAT(EndingProcesses(), IsEmpty());
  ASSERT_EQ(kill(child, SIGKILL), 0);
  testing::Await("the end to begin", [child] { return HasBegunToEnd(child); });
  testing::AwaitEnd("the child to end", child);
  EXPECT_FALSE(HasBegunToEnd(child));
}

}  // namespace
}  // namespace lossd::ending_processes_test
