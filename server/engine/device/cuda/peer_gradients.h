// Gradients of a head at its other replicas that this one's copy engines read where they are: over NVLink
// that is faster than having them sent, and takes no multiprocessor.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_PEER_GRADIENTS_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_PEER_GRADIENTS_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kernels/collectives/communicator.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/peer_memory.h"
#include "kernels/cuda/memory/result.h"

namespace lossd::engine {

// Belongs to one head and one communicator, which keeps it and ends it: an epoch of replicas must not hold
// memory of one that is gone. The device's owner thread makes all calls but Close.
class PeerGradients {
 public:
  // For the current device.
  static kernels::cuda::Result Create(kernels::collectives::Communicator* communicator,
                                      std::shared_ptr<PeerGradients>* peers);
  ~PeerGradients() { Close(); }
  PeerGradients(const PeerGradients&) = delete;
  PeerGradients& operator=(const PeerGradients&) = delete;

  bool Are(const kernels::collectives::Communicator* communicator) const {
    return communicator == &communicator_;
  }

  // One of this replica's gradients. A process gives no number twice: memory that is given back may come
  // again in the same place.
  struct Own {
    void* memory = nullptr;
    int64_t bytes = 0;
    int64_t number = 0;
  };
  // All replicas call it at the same time. Where they reach each other, *reached becomes what theirs is found
  // by: then what was put on `stream` before is done at all of them, and their gradients stay as they are
  // until all have met once more (a barrier). Otherwise it becomes null at all. UNAVAILABLE if one was lost.
  // What it gives is there until the next call.
  absl::Status Meet(const Own& own, cudaStream_t stream, const kernels::cuda::PeerMemory** reached);

  // Brings some of what was met here, beside what this device computes: after what was on `computing` when
  // pulling began, and before what is put there from now on.
  kernels::cuda::Result BeginPulling(cudaStream_t computing);
  kernels::cuda::Result Pull(const void* from, void* to, int64_t bytes, cudaStream_t computing);

  // Lets go of what others have, once it has been pulled. Any thread, while nothing else is called.
  void Close();

 private:
  // Gradients that were met together, by the numbers that they have at each replica.
  struct Met {
    std::vector<int64_t> numbers;
    kernels::cuda::PeerMemory memory;
  };

  explicit PeerGradients(kernels::collectives::Communicator* communicator) : communicator_(*communicator) {}

  kernels::collectives::Communicator& communicator_;
  int device_ = 0;
  bool out_of_reach_ = false;  // the same at all replicas
  std::deque<Met> met_;        // the same at all replicas, in the same order
  kernels::cuda::Stream pulling_;
  kernels::cuda::Event begun_;
  kernels::cuda::Event pulled_;  // the last piece
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_PEER_GRADIENTS_H_
