// Ranks for tests: each is a process of its own, which is forked before the program has a second thread.
#ifndef LOSSD_TESTS_UNIT_COLLECTIVES_RANKS_H_
#define LOSSD_TESTS_UNIT_COLLECTIVES_RANKS_H_

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "kernels/collectives/rendezvous.h"

namespace lossd::kernels::collectives::testing {

// Ranks meet in a folder: each puts a file there for each round.
class FolderRendezvous final : public Rendezvous {
 public:
  FolderRendezvous(std::string folder, int rank, int size)
      : folder_(std::move(folder)), rank_(rank), size_(size) {}

  Result AllGather(std::string own, std::chrono::milliseconds timeout,
                   std::vector<std::string>* all) override;
  // Returns when every rank has called it. Fails the test if one does not come.
  void Meet();
  // What a rank says for the others to find out, and whether another has said it.
  void Say(int what);
  bool HasSaid(int rank, int what) const;

 private:
  std::string NameOfSaid(int rank, int what) const;

  const std::string folder_;
  const int rank_;
  const int size_;
  int round_ = 0;
};

// A rank as its body sees it.
struct Rank {
  int rank = 0;
  int size = 1;
  FolderRendezvous& rendezvous;
};

// Runs body in `size` processes and waits for all of them. What body EXPECTs is reported where it runs; the
// test fails here if it failed there, or if a rank did not end in the way that is expected of it: by itself,
// or, if it is in `killed`, by SIGKILL. A rank that hangs is ended after minutes.
void RunRanks(int size, const std::function<void(Rank&)>& body, const std::vector<int>& killed = {});

// Ends the calling rank as a crash would.
[[noreturn]] void Die();

}  // namespace lossd::kernels::collectives::testing

#endif  // LOSSD_TESTS_UNIT_COLLECTIVES_RANKS_H_
