#include "tests/unit/collectives/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

namespace lossd::kernels::collectives::testing {
namespace {

// What a test may take before its ranks count as hanging: far more than any needs.
constexpr unsigned kGuardSeconds = 240;
constexpr std::chrono::seconds kMeetingGuard(200);

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "lossd-ranks-XXXXXX").string();
    if (mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~TemporaryFolder() {
    if (!path_.empty()) std::filesystem::remove_all(path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

[[noreturn]] void RunRank(Rank rank, const std::function<void(Rank&)>& body) {
  alarm(kGuardSeconds);
  body(rank);
  std::cout << std::flush;
  std::fflush(nullptr);
  _exit(::testing::Test::HasFailure() ? 1 : 0);
}

}  // namespace

Result FolderRendezvous::AllGather(std::string own, std::chrono::milliseconds timeout,
                                   std::vector<std::string>* all) {
  const auto name = [this](int rank) {
    return folder_ + "/" + std::to_string(round_) + "." + std::to_string(rank);
  };
  ++round_;
  std::ofstream(name(rank_) + ".new", std::ios::binary) << own;
  std::filesystem::rename(name(rank_) + ".new", name(rank_));
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  all->assign(static_cast<size_t>(size_), "");
  for (int rank = 0; rank < size_; ++rank) {
    while (!std::filesystem::exists(name(rank))) {
      if (std::chrono::steady_clock::now() > deadline) {
        return {Code::kTimeout, "rank " + std::to_string(rank) + " did not come to the rendezvous"};
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ostringstream content;
    content << std::ifstream(name(rank), std::ios::binary).rdbuf();
    (*all)[static_cast<size_t>(rank)] = content.str();
  }
  return {};
}

void FolderRendezvous::Meet() {
  std::vector<std::string> all;
  const Result met = AllGather("x", kMeetingGuard, &all);
  EXPECT_TRUE(met.ok()) << met.message();
}

std::string FolderRendezvous::NameOfSaid(int rank, int what) const {
  return folder_ + "/said." + std::to_string(rank) + "." + std::to_string(what);
}

void FolderRendezvous::Say(int what) { std::ofstream(NameOfSaid(rank_, what)) << what; }

bool FolderRendezvous::HasSaid(int rank, int what) const {
  return std::filesystem::exists(NameOfSaid(rank, what));
}

void RunRanks(int size, const std::function<void(Rank&)>& body, const std::vector<int>& killed) {
  const TemporaryFolder folder;
  ASSERT_FALSE(folder.path().empty());
  std::cout << std::flush;
  std::fflush(nullptr);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t process = fork();
    ASSERT_NE(process, -1);
    if (process == 0) {
      FolderRendezvous rendezvous(folder.path(), rank, size);
      RunRank(Rank{rank, size, rendezvous}, body);
    }
    processes.push_back(process);
  }
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(processes[static_cast<size_t>(rank)], &status, 0),
              processes[static_cast<size_t>(rank)]);
    if (std::find(killed.begin(), killed.end(), rank) != killed.end()) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
          << "rank " << rank << " was to be killed";
    } else if (WIFSIGNALED(status)) {
      ADD_FAILURE() << "rank " << rank << " was ended by signal " << WTERMSIG(status)
                    << (WTERMSIG(status) == SIGALRM ? ": it hung" : "");
    } else {
      EXPECT_EQ(WEXITSTATUS(status), 0) << "rank " << rank << " failed";
    }
  }
}

void Die() {
  std::cout << std::flush;
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

}  // namespace lossd::kernels::collectives::testing
