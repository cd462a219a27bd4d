// Ranks for tests of kernels: threads of one process with communicators of Gloo between them.
#ifndef LOSSD_TESTS_UNIT_KERNELS_THREAD_RANKS_H_
#define LOSSD_TESTS_UNIT_KERNELS_THREAD_RANKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "kernels/shard.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::testing {

// Runs body on `ranks` threads, which meet by a rendezvous; returns when all have.
using MeetingBody = std::function<void(int32_t rank, collectives::Rendezvous& rendezvous)>;
void MeetOnThreads(int32_t ranks, const MeetingBody& body);

// Runs body on `ranks` threads, each with a communicator of its own, which body may end; returns when all
// have.
using RankBody = std::function<void(int32_t rank, std::unique_ptr<collectives::Communicator>& communicator)>;
void RunOnThreads(int32_t ranks, const RankBody& body);

// Communicators that outlive the threads, by rank.
std::vector<std::unique_ptr<collectives::Communicator>> ConnectRanks(int32_t ranks);

struct OverRanks {
  int32_t ranks = 1;
  Segments segments = Segments::kOfRanks;
  int32_t answering_rank = 0;
};

// The shard of one of them; it points into `layout`.
Shard ShardOf(const ShardLayout& layout, const OverRanks& over, int32_t rank,
              collectives::Communicator* communicator);

// Runs the problems one after the other and gives what every rank has of each: [problem][rank].
std::vector<std::vector<StepResult>> RunSteps(const std::vector<Problem>& problems, const OverRanks& over,
                                              const StepOptions& options);

// One result of what all ranks have: dW and db in the order of the ranks, the rest from the rank that
// answers. What ranks must agree on and do not is told as a failure of the test.
StepResult Joined(const std::vector<StepResult>& of_ranks, const OverRanks& over);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_UNIT_KERNELS_THREAD_RANKS_H_
