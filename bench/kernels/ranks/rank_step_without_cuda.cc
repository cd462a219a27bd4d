// What says so where lossd-bench is built without CUDA.
#include "bench/kernels/ranks/rank_step.h"

namespace lossd::bench {

std::string ConnectCudaRank(int /*cuda_index*/, int /*rank*/, int /*ranks*/,
                            kernels::collectives::Rendezvous& /*rendezvous*/,
                            std::unique_ptr<kernels::collectives::Communicator>* /*communicator*/) {
  return "this lossd-bench was built without CUDA (no CUDA toolkit was found)";
}

// Not called: no rank has connected.
std::unique_ptr<RankStep> MakeCudaRankStep(const KernelCase& /*kernel_case*/,
                                           const DevicesOptions& /*options*/,
                                           kernels::collectives::Communicator& /*communicator*/) {
  return nullptr;
}

}  // namespace lossd::bench
