// One rank's part of a case of `lossd-bench kernels --devices`.
#ifndef LOSSD_BENCH_KERNELS_RANKS_RANK_STEP_H_
#define LOSSD_BENCH_KERNELS_RANKS_RANK_STEP_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/kernels/kernel_case.h"
#include "bench/kernels/ranks/devices_options.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace lossd::bench {

// While one rank computes the whole head, the others wait for it.
inline constexpr std::chrono::minutes kLongestRankTurn(30);

// Milliseconds, in the order in which they came.
using StageTimes = std::vector<std::pair<std::string, double>>;

// The whole head on this rank's device, and its shard of the same numbers, of which rank 0 answers the rows.
// Methods return what went wrong, or nothing; all but Create and TimeWhole are called by all ranks together.
class RankStep {
 public:
  RankStep() = default;
  virtual ~RankStep() = default;
  RankStep(const RankStep&) = delete;
  RankStep& operator=(const RankStep&) = delete;

  // Takes memory and fills it.
  virtual std::string Create() = 0;
  // Before the first step.
  virtual std::string Connect() = 0;
  // Lets go of what is other ranks'. They meet between this and the end of their own memory.
  virtual void Disconnect() = 0;
  // One step of both: how far the shard's results, those that this rank has, are from the whole's.
  virtual std::string Compare(RelativeErrors* difference) = 0;

  // options.steps follow each other: the mean of them.
  virtual std::string TimeWhole(double* milliseconds) = 0;
  virtual std::string TimeShard(double* milliseconds) = 0;
  // The shard's stages, each the mean of a step's. "wait for ..." is what it waited for other ranks.
  virtual std::string TimeStages(StageTimes* stages) = 0;

  virtual int64_t whole_tile_rows() const = 0;
  virtual int64_t tile_rows() const = 0;
  virtual bool uses_copy_engines() const = 0;
  virtual std::string hardware() const = 0;
};

// The communicator of all cases, Gloo's or NCCL's, and a rank's part of one of them. The case, the options
// and the communicator outlive it.
std::string ConnectCpuRank(int rank, int ranks, kernels::collectives::Rendezvous& rendezvous,
                           std::unique_ptr<kernels::collectives::Communicator>* communicator);
std::unique_ptr<RankStep> MakeCpuRankStep(const KernelCase& kernel_case, const DevicesOptions& options,
                                          kernels::collectives::Communicator& communicator);
std::string ConnectCudaRank(int cuda_index, int rank, int ranks, kernels::collectives::Rendezvous& rendezvous,
                            std::unique_ptr<kernels::collectives::Communicator>* communicator);
std::unique_ptr<RankStep> MakeCudaRankStep(const KernelCase& kernel_case, const DevicesOptions& options,
                                           kernels::collectives::Communicator& communicator);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_RANKS_RANK_STEP_H_
