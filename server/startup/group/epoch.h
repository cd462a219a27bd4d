// The processes of one epoch of a group that are on this node, as their parent sees them.
#ifndef LOSSD_SERVER_STARTUP_GROUP_EPOCH_H_
#define LOSSD_SERVER_STARTUP_GROUP_EPOCH_H_

#include <signal.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/startup/group/group_options.h"
#include "server/startup/group/parent_link.h"
#include "server/startup/port_file.h"

namespace lossd {

struct EpochOptions {
  int64_t number = 1;
  GroupOptions group;                  // the parent's
  std::vector<std::string> arguments;  // of every rank, the program's name first
  sigset_t signals;                    // that ranks begin with blocked
};

// Puts flags behind those of a command line, over which they win, but before a -- that ends flags.
void AddFlags(const std::vector<std::string>& flags, std::vector<std::string>* arguments);

// One rank that has ended.
struct RankEnd {
  int32_t rank = 0;
  int wait_status = 0;  // waitpid's
};

// One thread's. Ranks are killed by the kernel when that thread ends, however it does.
class Epoch {
 public:
  // Starts a process for each device, all by this program, each in a process group of its own, so that the
  // signals of a terminal reach the parent alone. They ignore SIGTERM and SIGINT: what a group is told goes
  // to the parent, and whoever tells a whole control group (systemd) tells it once. UNAVAILABLE if the folder
  // of the socket or a process cannot be had.
  static absl::StatusOr<std::unique_ptr<Epoch>> Start(const EpochOptions& options);
  // Kills and reaps what is left.
  ~Epoch();
  Epoch(const Epoch&) = delete;
  Epoch& operator=(const Epoch&) = delete;

  int64_t number() const { return number_; }
  // Ranks are numbered over all nodes: these are [first_rank(), end_rank()). The first speaks for the node;
  // it is the group's leader if its number is 0.
  int32_t first_rank() const { return first_rank_; }
  int32_t end_rank() const { return first_rank_ + static_cast<int32_t>(ranks_.size()); }
  const std::string& device(int32_t rank) const { return at(rank).device; }
  // 0: it has ended.
  pid_t pid(int32_t rank) const { return at(rank).pid; }
  bool Running() const;

  // To be polled for what ReadFirstRank reads; -1 once nothing more will come.
  int link() const { return ranks_.front().link.file(); }
  // Set once, when the leader serves. By then all ranks have joined: the socket goes, and its folder, so that
  // nobody else finds it.
  ChildLink::Said ReadFirstRank();

  void Signal(int32_t rank, int number) const;
  // Those that have ended since the last call. Does not wait.
  std::vector<RankEnd> Reap();
  // Whether it stands still (SIGSTOP), as of the last Reap().
  bool stopped(int32_t rank) const { return at(rank).stopped; }
  struct Killed {
    std::vector<int32_t> ranks;
    std::vector<RankEnd> ended_before;  // by themselves, as far as others had noticed
  };
  // SIGKILL to all that run, and waits for their end.
  Killed Kill();

 private:
  struct Rank {
    std::string device;
    pid_t pid = 0;
    ChildLink link;
    bool stopped = false;
  };

  Epoch(int64_t number, int32_t first_rank) : number_(number), first_rank_(first_rank) {}
  Rank& at(int32_t rank) { return ranks_[static_cast<size_t>(rank - first_rank_)]; }
  const Rank& at(int32_t rank) const { return ranks_[static_cast<size_t>(rank - first_rank_)]; }
  absl::Status MakeFolder();
  void RemoveFolder();
  // waitpid's status if the rank has ended. Notes whether it stands still.
  std::optional<int> Look(Rank& rank);
  // Until the rank has ended; waitpid's status.
  int Await(int32_t rank);
  absl::Status StartRank(const EpochOptions& options, const std::string& token, size_t local);

  const int64_t number_;
  const int32_t first_rank_;
  // For ranks of one node alone. Empty: it has gone.
  std::string folder_;
  std::string socket_;
  std::vector<Rank> ranks_;
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_EPOCH_H_
