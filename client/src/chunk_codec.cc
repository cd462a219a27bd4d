#include "client/src/chunk_codec.h"

namespace lossd::internal {

absl::StatusOr<DecodedResponse> DecodedResponse::Decode(grpc::ByteBuffer* buffer) {
  DecodedResponse response;
  if (!wire::Decode(buffer, &response.received_)) {
    return absl::InternalError("the server sent a message that is not a lossd.v1.ComputeResponse");
  }
  return response;
}

grpc::ByteBuffer EncodeStart(const v1::ComputeStart& start) {
  v1::ComputeRequest request;
  *request.mutable_start() = start;
  const grpc::Slice slice(request.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer EncodeChunk(const v1::Chunk& header, std::span<const std::byte> labels,
                             std::span<const std::byte> hidden_states, const LentMemory& lent,
                             std::span<const std::byte> teacher_hidden_states) {
  const grpc::Slice own = lent.Lend(hidden_states);
  if (teacher_hidden_states.empty()) return wire::Encode(header, labels, own);
  return wire::Encode(header, labels, own, lent.Lend(teacher_hidden_states));
}

}  // namespace lossd::internal
