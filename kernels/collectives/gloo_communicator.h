// Ranks that compute on CPUs: their memory goes over TCP, by Gloo.
#ifndef LOSSD_KERNELS_COLLECTIVES_GLOO_COMMUNICATOR_H_
#define LOSSD_KERNELS_COLLECTIVES_GLOO_COMMUNICATOR_H_

#include <chrono>
#include <memory>
#include <string>

#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "kernels/collectives/result.h"

namespace lossd::kernels::collectives {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  // The network: an interface such as "eth0", or if that is empty an IPv4 or IPv6 address of this host. What
  // goes over it is neither encrypted nor protected against change; only who connects is checked, by a token
  // that comes through the rendezvous.
  std::string interface = {};
  std::string address = "127.0.0.1";
  // For connecting, and for each call; at least 1 ms.
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
  // For connecting, if that is to end sooner: a rank that gives up before it has heard where the others are
  // is not noticed by those that have heard where it is.
  std::chrono::milliseconds connect_timeout = std::chrono::milliseconds::max();
};

// Connects this rank with the others; returns when all are connected. A group of one uses neither the network
// nor the rendezvous. Each communicator has a thread of Gloo's, which blocks all signals.
//
// A rank that dies or gives up is noticed at once by all who are in a call, also while others have yet to
// come.
Result ConnectGloo(const GlooOptions& options, Rendezvous& rendezvous,
                   std::unique_ptr<Communicator>* communicator);

}  // namespace lossd::kernels::collectives

#endif  // LOSSD_KERNELS_COLLECTIVES_GLOO_COMMUNICATOR_H_
