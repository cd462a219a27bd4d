// Ranks for benchmarks: processes that meet in memory that they share.
#ifndef LOSSD_BENCH_KERNELS_RANKS_RANK_PROCESSES_H_
#define LOSSD_BENCH_KERNELS_RANKS_RANK_PROCESSES_H_

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "kernels/collectives/rendezvous.h"

namespace lossd::bench {

// Forks `ranks` processes, which must happen before this one has used a GPU, and runs `body` in each with a
// rendezvous of all. Returns whether all bodies returned true. If one process ends otherwise, so do the
// others.
bool RunRanks(int ranks,
              const std::function<bool(int rank, kernels::collectives::Rendezvous& rendezvous)>& body);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_RANKS_RANK_PROCESSES_H_
