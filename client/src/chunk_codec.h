// The bytes of ComputeRequest and ComputeResponse, with the tensors copied exactly once: from the caller's
// memory into the message, and from the message into the caller's memory. Same wire format as the generated
// classes'. Pure functions.
#ifndef LOSSD_CLIENT_SRC_CHUNK_CODEC_H_
#define LOSSD_CLIENT_SRC_CHUNK_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

grpc::ByteBuffer EncodeStart(const v1::ComputeStart& start);

// `header` is the chunk without `labels` and `hidden_states`, which are given beside it.
grpc::ByteBuffer EncodeChunk(const v1::Chunk& header, std::span<const std::byte> labels,
                             std::span<const std::byte> hidden_states);

// A received message; refers to the buffer's slices and keeps them.
class DecodedResponse {
 public:
  // INTERNAL if the bytes are not a ComputeResponse.
  static absl::StatusOr<DecodedResponse> Decode(grpc::ByteBuffer* buffer);

  // Everything but `losses` and `dx` of a result.
  const v1::ComputeResponse& header() const { return header_; }

  int64_t losses_bytes() const { return losses_.size; }
  int64_t dx_bytes() const { return dx_.size; }
  // The target's size must be losses_bytes() or dx_bytes().
  void CopyLosses(std::span<std::byte> target) const { Copy(losses_, target); }
  void CopyDx(std::span<std::byte> target) const { Copy(dx_, target); }

 private:
  struct Range {
    int64_t begin = 0;
    int64_t size = 0;
  };
  friend class ResponseParser;
  void Copy(Range range, std::span<std::byte> target) const;

  v1::ComputeResponse header_;
  Range losses_;
  Range dx_;
  std::vector<grpc::Slice> slices_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CHUNK_CODEC_H_
