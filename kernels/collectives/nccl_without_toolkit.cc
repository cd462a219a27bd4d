// Takes the place of nccl_communicator.cc where lossd is built without CUDA.
#include "kernels/collectives/nccl_communicator.h"

namespace lossd::kernels::collectives {

Result ConnectNccl(const NcclOptions& /*options*/, Rendezvous& /*rendezvous*/,
                   std::unique_ptr<Communicator>* /*communicator*/) {
  return {Code::kUnavailable,
          std::string(NameOf(Operation::kConnect)) + ": this lossd was built without CUDA"};
}

void PrepareNccl(const std::string& /*interface*/) {}

}  // namespace lossd::kernels::collectives
