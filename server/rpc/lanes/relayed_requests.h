// The messages of a Compute stream that another rank passes on.
#ifndef LOSSD_SERVER_RPC_LANES_RELAYED_REQUESTS_H_
#define LOSSD_SERVER_RPC_LANES_RELAYED_REQUESTS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "server/rpc/compute/compute_requests.h"
#include "server/rpc/lanes/relay_group.h"
#include "server/rpc/lanes/relay_records.h"
#include "server/rpc/lanes/relay_wire.h"

namespace lossd::rpc {

class RelayedRequests final : public ComputeRequests {
 public:
  // `records` outlives it.
  RelayedRequests(RelayGroup group, RelayRecords* records) : group_(std::move(group)), records_(records) {}

  absl::Status Parse(grpc::ByteBuffer* bytes, wire::ReceivedRequest* request) override;
  absl::Status CheckSession(bool deterministic) const override;
  void Place(engine::Chunk* chunk) override;
  std::string Peer() const override { return peer_; }

  // The stream is over: nothing comes any more.
  void End();

 private:
  absl::Status TakeHello(const std::optional<RelayId>& hello);

  const RelayGroup group_;
  RelayRecords* const records_;
  std::optional<RelayKey> key_;
  std::string peer_;          // the client's
  engine::HeldTensors held_;  // of the message that was read last
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_LANES_RELAYED_REQUESTS_H_
