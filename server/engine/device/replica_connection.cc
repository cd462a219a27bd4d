#include "server/engine/device/replica_connection.h"

#include <utility>

#include "kernels/collectives/communicator.h"
#include "kernels/collectives/gloo_communicator.h"
#include "server/engine/device/rank_status.h"

namespace lossd::engine {

using kernels::collectives::Communicator;

namespace {

class OwnedCommunicators final : public ReplicaConnection {
 public:
  OwnedCommunicators(std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> device)
      : host_(std::move(host)),
        device_(std::move(device)),
        communicators_{.device = device_ == nullptr ? host_.get() : device_.get(), .host = host_.get()} {}

  const ReplicaCommunicators& communicators() const override { return communicators_; }
  void Abort() override {
    host_->Abort();
    if (device_ != nullptr) device_->Abort();
  }

 private:
  const std::unique_ptr<Communicator> host_;
  const std::unique_ptr<Communicator> device_;
  const ReplicaCommunicators communicators_;
};

}  // namespace

std::shared_ptr<const ReplicaCommunicators> CommunicatorsOf(std::shared_ptr<ReplicaConnection> connection) {
  const ReplicaCommunicators* const communicators = &connection->communicators();
  return {std::move(connection), communicators};
}

std::shared_ptr<ReplicaConnection> OwningConnection(std::unique_ptr<Communicator> host,
                                                    std::unique_ptr<Communicator> device) {
  return std::make_shared<OwnedCommunicators>(std::move(host), std::move(device));
}

absl::StatusOr<std::unique_ptr<Communicator>> ConnectReplicaHosts(
    const ReplicaNetwork& network, kernels::collectives::Rendezvous& rendezvous) {
  std::unique_ptr<Communicator> host;
  const absl::Status connected =
      ToStatus(kernels::collectives::ConnectGloo({.rank = network.place.replica,
                                                  .size = network.place.replicas,
                                                  .interface = network.interface,
                                                  .timeout = network.timeout,
                                                  .connect_timeout = network.connect_timeout},
                                                 rendezvous, &host));
  if (!connected.ok()) return connected;
  return host;
}

}  // namespace lossd::engine
