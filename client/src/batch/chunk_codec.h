// What the client sends and receives on a Compute stream. A chunk's hidden states are referred to where the
// caller has them; results are copied once, from where they arrived into the caller's memory. Pure functions.
#ifndef LOSSD_CLIENT_SRC_BATCH_CHUNK_CODEC_H_
#define LOSSD_CLIENT_SRC_BATCH_CHUNK_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "client/src/batch/lent_memory.h"
#include "grpcpp/support/byte_buffer.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/compute_wire.h"

namespace lossd::internal {

grpc::ByteBuffer EncodeStart(const v1::ComputeStart& start);

// `header` is the chunk without `labels`, which are copied, and hidden states, one piece after the other,
// which are referred to until gRPC has let go of them, as `lent` knows; or copied, if the pieces are small.
grpc::ByteBuffer EncodeChunk(const v1::Chunk& header, std::span<const std::byte> labels,
                             std::span<const std::span<const std::byte>> hidden_states,
                             const LentMemory& lent,
                             std::span<const std::span<const std::byte>> teacher_hidden_states = {});

// A received message; keeps the slices it came in.
class DecodedResponse {
 public:
  // INTERNAL if the bytes are not a ComputeResponse.
  static absl::StatusOr<DecodedResponse> Decode(grpc::ByteBuffer* buffer);

  // Everything but `losses` and `dx` of a result.
  const v1::ComputeResponse& header() const { return received_.message; }

  int64_t losses_bytes() const { return received_.small.bytes; }
  int64_t dx_bytes() const { return received_.large.bytes; }
  // The targets' sizes together must be losses_bytes() or dx_bytes().
  void CopyLosses(std::span<const std::span<std::byte>> targets) const { received_.small.CopyTo(targets); }
  void CopyDx(std::span<const std::span<std::byte>> targets) const { received_.large.CopyTo(targets); }

 private:
  wire::ReceivedResponse received_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_CHUNK_CODEC_H_
