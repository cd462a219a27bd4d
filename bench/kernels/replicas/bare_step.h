// The bare operations of a step of replicas, one replica's part of them.
#ifndef LOSSD_BENCH_KERNELS_REPLICAS_BARE_STEP_H_
#define LOSSD_BENCH_KERNELS_REPLICAS_BARE_STEP_H_

#include <cstdint>
#include <memory>
#include <string>

#include "bench/kernels/replicas/replica_case.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "kernels/slices.h"

namespace lossd::bench {

// All replicas call its methods together. They return when the operation is done here, with what went wrong,
// or nothing.
class BareStep {
 public:
  BareStep() = default;
  virtual ~BareStep() = default;
  BareStep(const BareStep&) = delete;
  BareStep& operator=(const BareStep&) = delete;

  // Takes memory and connects.
  virtual std::string Create() = 0;
  // Every replica gets the fp32 sum of its slice of the gradient.
  virtual std::string ReduceScatter() = 0;
  // The optimizer over the rows of its slice.
  virtual std::string Step() = 0;
  // Every replica gets the weights of all slices.
  virtual std::string AllGather() = 0;
};

// What it takes outlives it.
std::unique_ptr<BareStep> MakeCpuBareStep(const ReplicaCase& of, kernels::collectives::Communicator& host);
// The library's own collectives. `rendezvous` is used by Create.
std::unique_ptr<BareStep> MakeCudaBareStep(const ReplicaCase& of, int replica,
                                           kernels::collectives::Rendezvous& rendezvous);

// The rows of the replica's slice.
inline int64_t SteppedRowsOf(const ReplicaCase& of, int replica) {
  return kernels::SliceLayout(of.step.vocab, of.replicas()).Slice(replica).count;
}

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_REPLICAS_BARE_STEP_H_
