// How the replicas of a head reach each other.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_REPLICA_COMMUNICATORS_H_
#define LOSSD_SERVER_ENGINE_DEVICE_REPLICA_COMMUNICATORS_H_

#include <cstdint>

namespace lossd::kernels::collectives {
class Communicator;
}  // namespace lossd::kernels::collectives

namespace lossd::engine {

// Rank r of each is replica r. Made anew whenever a replica was lost, unlike those of a group's ranks. Called
// by the device's owner thread alone.
struct ReplicaCommunicators {
  kernels::collectives::Communicator* device = nullptr;  // moves the device's memory
  kernels::collectives::Communicator* host = nullptr;    // the same where the device is the host
  // Where the device is a group, these are its leader's, and the other ranks know theirs by this number.
  uint64_t connection = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_REPLICA_COMMUNICATORS_H_
