// The bytes of a row stream's messages, ReadGradientResponse and ReadWeightsResponse, without copies of the
// rows. Same wire format as the generated classes', and the same messages accepted: what does not look as
// every protobuf library writes it goes through the generated parser. Pure functions.
#ifndef LOSSD_PROTO_WIRE_ROW_WIRE_H_
#define LOSSD_PROTO_WIRE_ROW_WIRE_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/tensor.h"

namespace lossd::wire {

template <typename Message>
struct ReceivedRows {
  Message message;                    // everything but the rows of the matrix
  Tensor rows;                        // ReadGradientResponse.gradient, ReadWeightsResponse.weights
  std::shared_ptr<const void> owner;  // keeps their memory
};

// Takes the bytes. False, and nothing of use in `received`, exactly if the generated class cannot parse them.
bool Decode(grpc::ByteBuffer* bytes, ReceivedRows<v1::ReadGradientResponse>* received);
bool Decode(grpc::ByteBuffer* bytes, ReceivedRows<v1::ReadWeightsResponse>* received);

// ReadGradientResponse.checksum of these bytes.
uint64_t ChecksumOf(std::string_view bias_gradient, std::span<const std::span<const std::byte>> gradient);

// `header` is the message without the rows of the matrix, which are referred to until gRPC drops them.
// Together below 2 GiB.
grpc::ByteBuffer Encode(const v1::ReadGradientResponse& header, const grpc::Slice& rows);
grpc::ByteBuffer Encode(const v1::ReadWeightsResponse& header, const grpc::Slice& rows);
// The same of an answer with logits.
grpc::ByteBuffer Encode(const v1::LogitsResponse& header, const grpc::Slice& logits);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_ROW_WIRE_H_
