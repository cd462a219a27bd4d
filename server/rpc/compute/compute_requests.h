// How the messages of a Compute stream come in: from a client, or by way of another rank of the group, which
// keeps their tensors.
#ifndef LOSSD_SERVER_RPC_COMPUTE_COMPUTE_REQUESTS_H_
#define LOSSD_SERVER_RPC_COMPUTE_COMPUTE_REQUESTS_H_

#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "absl/status/status.h"
#include "proto/wire/compute_wire.h"
#include "server/engine/chunk/chunk.h"
#include "server/rpc/convert/wire.h"

namespace lossd::rpc {

// Those of a client. Used by one thread at a time.
class ComputeRequests {
 public:
  ComputeRequests() = default;
  virtual ~ComputeRequests() = default;
  ComputeRequests(const ComputeRequests&) = delete;
  ComputeRequests& operator=(const ComputeRequests&) = delete;

  // Takes the bytes of the next message. INVALID_ARGUMENT as rpc::Parse.
  virtual absl::Status Parse(grpc::ByteBuffer* bytes, wire::ReceivedRequest* request) {
    return rpc::Parse(bytes, request);
  }
  // Not OK if a lane of such a session cannot be opened in this way.
  virtual absl::Status CheckSession(bool /*deterministic*/) const { return absl::OkStatus(); }
  // Where they come from, as people read it, if that is not at the other end of the call. After the first
  // one.
  virtual std::string Peer() const { return {}; }
  // After a message that was a chunk: what it became.
  virtual void Place(engine::Chunk* /*chunk*/) {}
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_COMPUTE_COMPUTE_REQUESTS_H_
