#include "bench/kernels/ranks/rank_processes.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>
#include <thread>

namespace lossd::bench {
namespace {

namespace collectives = kernels::collectives;

constexpr int kMostProcesses = 8;
constexpr size_t kMostBytes = 256 << 10;

// What a rank gives lies here until it gives the next: all have read it by then, because they have given the
// next themselves.
struct Place {
  std::atomic<int64_t> rounds = 0;
  std::array<size_t, 2> sizes{};
  std::array<std::array<char, kMostBytes>, 2> bytes{};
};
struct Board {
  std::array<Place, kMostProcesses> places;
};

class BoardRendezvous final : public kernels::collectives::Rendezvous {
 public:
  BoardRendezvous(Board& board, int rank, int ranks) : board_(board), rank_(rank), ranks_(ranks) {}

  collectives::Result AllGather(std::string own, std::chrono::milliseconds timeout,
                                std::vector<std::string>* all) override {
    const auto half = static_cast<size_t>(round_ % 2);
    Place& place = board_.places[static_cast<size_t>(rank_)];
    if (own.size() > kMostBytes) return {collectives::Code::kInvalidArgument, "too much for a rendezvous"};
    std::memcpy(place.bytes[half].data(), own.data(), own.size());
    place.sizes[half] = own.size();
    place.rounds.store(++round_);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    all->clear();
    for (int rank = 0; rank < ranks_; ++rank) {
      const Place& other = board_.places[static_cast<size_t>(rank)];
      while (other.rounds.load() < round_) {
        if (std::chrono::steady_clock::now() > deadline) {
          return {collectives::Code::kTimeout, "rank " + std::to_string(rank) + " did not come"};
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      all->emplace_back(other.bytes[half].data(), other.sizes[half]);
    }
    return {};
  }

 private:
  Board& board_;
  const int rank_;
  const int ranks_;
  int64_t round_ = 0;
};

}  // namespace

bool RunRanks(int ranks,
              const std::function<bool(int rank, kernels::collectives::Rendezvous& rendezvous)>& body) {
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  auto* board = new (memory) Board;
  std::fflush(nullptr);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t process = fork();
    if (process == 0) {
      BoardRendezvous rendezvous(*board, rank, ranks);
      const bool good = body(rank, rendezvous);
      std::fflush(nullptr);
      _exit(good ? 0 : 1);
    }
    processes.push_back(process);
  }
  bool all_good = true;
  for (int left = ranks; left > 0; --left) {
    int status = 0;
    const pid_t ended = wait(&status);
    for (pid_t& process : processes) {
      if (process == ended) process = 0;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    if (all_good) {
      for (const pid_t process : processes) {
        if (process > 0) (void)kill(process, SIGKILL);
      }
    }
    all_good = false;
  }
  munmap(memory, sizeof(Board));
  return all_good;
}

}  // namespace lossd::bench
