// Memory of this rank's device that other ranks of the host copy into or read, and theirs. Where copy engines
// move it, that takes no multiprocessor from a product.
#ifndef LOSSD_KERNELS_CUDA_MEMORY_PEER_MEMORY_H_
#define LOSSD_KERNELS_CUDA_MEMORY_PEER_MEMORY_H_

#include <cstdint>
#include <vector>

#include "kernels/collectives/communicator.h"
#include "kernels/cuda/memory/result.h"

namespace lossd::kernels::cuda {

// Move-only; the ranks' memories are let go of on destruction, while the device is current that was when they
// were reached. This rank's own must outlive what the others have of it. Reading is safe from one that is
// lost: of another process's memory the driver keeps what it was until it is let go of, whether that process
// has given it back or was killed.
class PeerMemory {
 public:
  // Which ranks may reach each other. Ranks that are threads of one process have queues of a device in
  // common: who waits in a stream for what another rank puts on its own (AwaitFlag) wants other processes.
  enum class Among { kProcesses, kThreadsToo };

  PeerMemory() = default;
  PeerMemory(PeerMemory&& other) noexcept;
  PeerMemory& operator=(PeerMemory&& other) noexcept;
  ~PeerMemory();

  // `memory` is of cudaMalloc, and what the others give has as many bytes. All ranks call it at the same
  // time; it waits for `stream`. Where one rank cannot reach another's memory (on another host, say), nobody
  // reaches any; that is no failure.
  static Result Create(collectives::Communicator* communicator, void* memory, int64_t bytes,
                       cudaStream_t stream, PeerMemory* peers, Among among = Among::kProcesses);

  // Whether At() has anything to give.
  bool IsReached() const { return !places_.empty(); }
  bool Has(const void* place) const;
  // The place in the rank's memory that corresponds to one in this rank's own; null if it is out of reach.
  void* At(int rank, const void* place) const;

 private:
  // Where another rank's memory begins; null if it cannot be opened.
  char* Open(const cudaIpcMemHandle_t& handle, bool there_is_one, int64_t place);
  void Close();

  const char* own_ = nullptr;
  int64_t bytes_ = 0;
  int rank_ = 0;
  std::vector<char*> places_;  // of ranks, where their memories begin
  std::vector<void*> opened_;  // what is to be closed
};

// In `stream`: writes a flag, which may be in another rank's memory, when all before it is done and visible
// there; and waits until a flag of this device is `value` or has gone beyond it (in the circle of numbers).
// The device's front end does both.
Result SetFlag(cudaStream_t stream, void* flag, uint32_t value);
Result AwaitFlag(cudaStream_t stream, void* flag, uint32_t value);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_MEMORY_PEER_MEMORY_H_
