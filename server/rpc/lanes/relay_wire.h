// What a rank passes on to the leader of a client's Compute stream: RelayRequest (relay.proto). Pure
// functions.
#ifndef LOSSD_SERVER_RPC_LANES_RELAY_WIRE_H_
#define LOSSD_SERVER_RPC_LANES_RELAY_WIRE_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/compute_wire.h"
#include "server/engine/chunk/chunk.h"

namespace lossd::rpc {

// Who opens a relay, and which of its own it is.
struct RelayId {
  int64_t epoch = 0;
  int32_t rank = 0;
  uint64_t relay = 0;     // from 1
  std::string peer = {};  // the client's address, for people

  bool operator==(const RelayId&) const = default;
};

struct RelayedRequest {
  std::optional<RelayId> hello = {};
  wire::ReceivedRequest request;  // without hidden states
  engine::HeldTensors held = {};  // of a chunk: without the rank; number 0: it is none
};

// Takes the bytes. INVALID_ARGUMENT, and nothing of use in `relayed`, if they are no RelayRequest that a rank
// writes.
absl::Status ParseRelayed(grpc::ByteBuffer* bytes, RelayedRequest* relayed);

// `request` has no hidden states. A chunk has a number in `held`, any other message none.
grpc::ByteBuffer WriteRelayed(const std::optional<RelayId>& hello, const v1::ComputeRequest& request,
                              const engine::HeldTensors& held);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_LANES_RELAY_WIRE_H_
