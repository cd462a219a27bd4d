#include "client/src/batch/chunk_codec.h"

#include <cstring>
#include <vector>

namespace lossd::internal {
namespace {

size_t SizeOfAll(std::span<const std::span<const std::byte>> parts) {
  size_t size = 0;
  for (const std::span<const std::byte> part : parts) size += part.size();
  return size;
}

// Each slice of a message costs gRPC about what it costs to copy this much.
bool WorthLending(std::span<const std::span<const std::byte>> parts) {
  constexpr size_t kLeastLent = 4096;
  return parts.size() <= 1 || SizeOfAll(parts) >= kLeastLent * parts.size();
}

grpc::Slice Copy(std::span<const std::span<const std::byte>> parts) {
  grpc_slice slice = grpc_slice_malloc(SizeOfAll(parts));
  uint8_t* out = GRPC_SLICE_START_PTR(slice);
  for (const std::span<const std::byte> part : parts) {
    std::memcpy(out, part.data(), part.size());
    out += part.size();
  }
  return {slice, grpc::Slice::STEAL_REF};
}

std::vector<grpc::Slice> Slices(std::span<const std::span<const std::byte>> parts, const LentMemory& lent) {
  if (!WorthLending(parts)) return {Copy(parts)};
  std::vector<grpc::Slice> slices;
  for (const std::span<const std::byte> part : parts) slices.push_back(lent.Lend(part));
  return slices;
}

}  // namespace

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
                             std::span<const std::span<const std::byte>> hidden_states,
                             const LentMemory& lent,
                             std::span<const std::span<const std::byte>> teacher_hidden_states) {
  return wire::Encode(header, labels, Slices(hidden_states, lent), Slices(teacher_hidden_states, lent));
}

}  // namespace lossd::internal
