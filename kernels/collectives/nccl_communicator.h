// Ranks that compute on GPUs: device memory goes over NVLink, PCIe or the network, by NCCL.
#ifndef LOSSD_KERNELS_COLLECTIVES_NCCL_COMMUNICATOR_H_
#define LOSSD_KERNELS_COLLECTIVES_NCCL_COMMUNICATOR_H_

#include <chrono>
#include <memory>
#include <string>

#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "kernels/collectives/result.h"

namespace lossd::kernels::collectives {

struct NcclOptions {
  int rank = 0;
  int size = 1;
  // The CUDA device of this rank; no other rank of the group may have it. It must be the current one of the
  // thread that makes calls.
  int device = 0;
  // For giving each call to the device, and for AllReduce, Barrier and Wait; at least 1 ms.
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
  // For connecting; 0: the same.
  std::chrono::milliseconds connect_timeout{0};
  // Thread blocks that a call takes of the device at most, so that it can run beside a product that leaves as
  // many multiprocessors; the same on all ranks. 0: as many as NCCL likes.
  int most_blocks = 0;
  // Thread blocks that a call takes at least, where nothing else is to run beside it: sending from one rank
  // to another, NCCL takes fewer than the wires need. 0: as many as NCCL likes.
  int least_blocks = 0;
  // The network between hosts, an interface such as "eth0", unless the environment names one
  // (NCCL_SOCKET_IFNAME); empty: NCCL looks for one.
  std::string interface = {};
  // What is opened: found as any shared library is, or a path.
  std::string library = "libnccl.so.2";
};

// Opens NCCL, 2.18 or later, and connects this rank with the others; returns when all are connected. A group
// of one does not use the rendezvous. Makes options.device the thread's current device. Calls PrepareNccl.
// Fails with kUnavailable where lossd was built without CUDA.
//
// NCCL's own settings (NCCL_SOCKET_IFNAME, NCCL_DEBUG and others) are read from the environment; what goes
// between hosts is neither encrypted nor authenticated.
Result ConnectNccl(const NcclOptions& options, Rendezvous& rendezvous,
                   std::unique_ptr<Communicator>* communicator);

// Sets NCCL_NVLS_ENABLE=0 in the environment, whatever it was: sums by NVLS depend on what was allocated
// before; and NCCL_SOCKET_IFNAME to this interface, unless it is set or this is empty. The first call in a
// process must come before other threads may read the environment; the same again changes nothing.
void PrepareNccl(const std::string& interface);

}  // namespace lossd::kernels::collectives

#endif  // LOSSD_KERNELS_COLLECTIVES_NCCL_COMMUNICATOR_H_
