// Rows that one rank has and all ranks compute with: they go from there to the others while something else is
// computed.
#ifndef LOSSD_KERNELS_CUDA_MEMORY_SHARED_ROWS_H_
#define LOSSD_KERNELS_CUDA_MEMORY_SHARED_ROWS_H_

#include <cstdint>
#include <vector>

#include "kernels/collectives/communicator.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/peer_memory.h"
#include "kernels/cuda/memory/result.h"

namespace lossd::kernels::cuda {

// Move-only; one thread makes all calls, at every rank the same ones in the same order.
class SharedRows {
 public:
  // `communicator` outlives this.
  Result Create(collectives::Communicator* communicator);
  // Memory that rows will lie in, as large at every rank; it outlives this. Waits for all ranks.
  Result Add(void* memory, int64_t bytes, cudaStream_t stream);

  // Whether copy engines reach every memory that was added: rows then take no multiprocessor, and wait for no
  // kernel. Otherwise the communicator moves them. The same at all ranks.
  bool AreCopied() const { return copied_; }

  // In `stream`, at `place` in a memory that was added: at rank `source`, behind what has put the rows there,
  // sends them to all other ranks, where nobody may use the place any more; there, what follows in the stream
  // finds them.
  Result Share(int source, void* place, int64_t bytes, cudaStream_t stream);

 private:
  Result Send(void* place, int64_t bytes, cudaStream_t stream);
  // How many rows of a source have come here, in `arrived_`.
  void* Arrived(int source) const { return static_cast<uint32_t*>(arrived_.data()) + source; }

  collectives::Communicator* communicator_ = nullptr;
  bool copied_ = true;
  // What different sources send is not ordered with each other: each has a count of its own.
  std::vector<uint32_t> times_;  // that a source has shared rows
  DeviceBuffer arrived_;         // how many of these have come here
  PeerMemory arrivals_;
  std::vector<PeerMemory> memories_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_MEMORY_SHARED_ROWS_H_
