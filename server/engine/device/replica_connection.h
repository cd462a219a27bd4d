// How one replica's device is connected with those of the others, until one of them is lost.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_REPLICA_CONNECTION_H_
#define LOSSD_SERVER_ENGINE_DEVICE_REPLICA_CONNECTION_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/collectives/rendezvous.h"
#include "server/engine/common/replica_place.h"
#include "server/engine/device/replica_communicators.h"

namespace lossd::engine {

// What Device::ConnectReplicas connects by; but for `place.replica` the same at all replicas.
struct ReplicaNetwork {
  ReplicaPlace place;
  // By which devices reach each other; empty: the loopback interface.
  std::string interface = {};
  // For each exchange, and for connecting; at least 1 ms.
  std::chrono::milliseconds timeout{1};
  std::chrono::milliseconds connect_timeout{1};
};

// Outlives what uses its communicators.
class ReplicaConnection {
 public:
  virtual ~ReplicaConnection() = default;

  // Live as long as this.
  virtual const ReplicaCommunicators& communicators() const = 0;
  // An exchange under way, here and at the other replicas, fails soon, and later ones at once, with
  // UNAVAILABLE. Any thread, any number of times; does not wait.
  virtual void Abort() = 0;
};

// Keeps the connection.
std::shared_ptr<const ReplicaCommunicators> CommunicatorsOf(std::shared_ptr<ReplicaConnection> connection);

// One that owns its communicators. Where `device` is null the host's moves the device's memory, too.
std::shared_ptr<ReplicaConnection> OwningConnection(
    std::unique_ptr<kernels::collectives::Communicator> host,
    std::unique_ptr<kernels::collectives::Communicator> device);

// What moves the host's memory between replicas: by Gloo, which other devices need beside their own.
// UNAVAILABLE with what it said.
absl::StatusOr<std::unique_ptr<kernels::collectives::Communicator>> ConnectReplicaHosts(
    const ReplicaNetwork& network, kernels::collectives::Rendezvous& rendezvous);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_REPLICA_CONNECTION_H_
