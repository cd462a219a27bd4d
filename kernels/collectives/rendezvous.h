// How ranks that have no connection yet tell each other where they are.
#ifndef LOSSD_KERNELS_COLLECTIVES_RENDEZVOUS_H_
#define LOSSD_KERNELS_COLLECTIVES_RENDEZVOUS_H_

#include <chrono>
#include <string>
#include <vector>

#include "kernels/collectives/result.h"

namespace lossd::kernels::collectives {

// Implemented by who starts the ranks. It carries a few hundred bytes a rank: addresses and ids, and the
// tokens by which ranks know each other, so it must not be readable by strangers. Used by the thread that
// makes a communicator, only while it makes it.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  // Waits until every rank of the group has made this call as often as this rank, and then sets (*all)[r] to
  // what rank r gave in it. After `timeout` it fails with kTimeout, and the message names the ranks that are
  // missing.
  virtual Result AllGather(std::string own, std::chrono::milliseconds timeout,
                           std::vector<std::string>* all) = 0;
};

}  // namespace lossd::kernels::collectives

#endif  // LOSSD_KERNELS_COLLECTIVES_RENDEZVOUS_H_
