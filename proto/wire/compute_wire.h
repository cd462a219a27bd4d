// The bytes of a Compute stream's messages without copies of the large tensors: ComputeRequest with a chunk
// and ComputeResponse with a result, as grpc::ByteBuffer. Same wire format as the generated classes', and the
// same messages accepted: what does not look as every protobuf library writes it goes through the generated
// parser. Pure functions.
#ifndef LOSSD_PROTO_WIRE_COMPUTE_WIRE_H_
#define LOSSD_PROTO_WIRE_COMPUTE_WIRE_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "lossd/v1/loss.pb.h"
#include "proto/wire/tensor.h"

namespace lossd::wire {

// What gRPC reads from a socket into one allocation, at most; a slice of a message keeps all of it.
inline constexpr int64_t kReadBlockBytes = int64_t{64} << 10;

template <typename Message>
struct Received {
  Message message;  // everything but the tensors
  Tensor small;     // Chunk.labels, ChunkResult.losses
  Tensor large;     // Chunk.hidden_states, ChunkResult.dx
  Tensor extra;     // Chunk.teacher_hidden_states
  // Keeps the memory of all: the message's slices, which may be parts of larger blocks.
  std::shared_ptr<const void> owner;
  int64_t kept_bytes = 0;  // by the owner, at most

  void Clear() { *this = Received(); }
};
using ReceivedRequest = Received<v1::ComputeRequest>;
using ReceivedResponse = Received<v1::ComputeResponse>;

// Takes the bytes. False, and nothing of use in `received`, exactly if the generated class cannot parse them.
bool Decode(grpc::ByteBuffer* bytes, ReceivedRequest* received);
bool Decode(grpc::ByteBuffer* bytes, ReceivedResponse* received);

// `header` is the message without its tensors. The small one is copied, the large ones, in one piece or
// several, are referred to until gRPC drops them. Together below 2 GiB.
grpc::ByteBuffer Encode(const v1::Chunk& header, std::span<const std::byte> labels,
                        std::span<const grpc::Slice> hidden_states,
                        std::span<const grpc::Slice> teacher_hidden_states = {});
grpc::ByteBuffer Encode(const v1::Chunk& header, std::span<const std::byte> labels,
                        const grpc::Slice& hidden_states, const grpc::Slice& teacher_hidden_states = {});
grpc::ByteBuffer Encode(const v1::ChunkResult& header, std::span<const std::byte> losses,
                        const grpc::Slice& dx);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_COMPUTE_WIRE_H_
