#include "proto/wire/row_wire.h"

#include <grpcpp/impl/codegen/proto_utils.h>

// Compiled in: programs that link the installed library need no xxhash of their own.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "proto/wire/field_reader.h"
#include "proto/wire/field_writer.h"

namespace lossd::wire {
namespace {

// In all messages the rows have the same number, the highest.
constexpr uint32_t kRows = v1::ReadGradientResponse::kGradientFieldNumber;
static_assert(kRows == v1::ReadWeightsResponse::kWeightsFieldNumber);
static_assert(kRows == v1::LogitsResponse::kLogitsFieldNumber);

std::string TakeRows(v1::ReadGradientResponse* message) {
  return std::exchange(*message->mutable_gradient(), {});
}
std::string TakeRows(v1::ReadWeightsResponse* message) {
  return std::exchange(*message->mutable_weights(), {});
}

// False if the message is anything but plain fields, be it valid or not.
bool Split(const std::vector<grpc::Slice>& slices, Tensor* rows, std::string* rest) {
  FieldReader reader(slices);
  while (reader.remaining() > 0) {
    const FieldReader::Mark begin = reader.mark();
    uint32_t tag = 0;
    if (!reader.ReadTag(&tag)) return false;
    if (tag == Tag(kRows)) {
      rows->parts.clear();  // the last one counts
      if (!reader.ReadSize(&rows->bytes)) return false;
      reader.Take(rows->bytes, &rows->parts);
    } else {
      if (!reader.SkipValue(tag)) return false;
      reader.AppendSince(begin, rest);
    }
  }
  return true;
}

// By the generated parser, which copies the rows.
template <typename Message>
bool DecodeOther(grpc::ByteBuffer* bytes, ReceivedRows<Message>* received) {
  if (!grpc::SerializationTraits<Message>::Deserialize(bytes, &received->message).ok()) return false;
  auto rows = std::make_shared<std::string>(TakeRows(&received->message));
  received->rows.bytes = static_cast<int64_t>(rows->size());
  if (!rows->empty()) received->rows.parts.push_back(std::as_bytes(std::span(*rows)));
  received->owner = std::move(rows);
  return true;
}

template <typename Message>
bool DecodeMessage(grpc::ByteBuffer* bytes, ReceivedRows<Message>* received) {
  *received = {};
  auto slices = std::make_shared<std::vector<grpc::Slice>>();
  if (!bytes->Valid() || !bytes->Dump(slices.get()).ok()) return false;
  std::string rest;
  if (!Split(*slices, &received->rows, &rest) || !received->message.ParseFromString(rest)) {
    *received = {};
    slices.reset();
    return DecodeOther(bytes, received);
  }
  bytes->Clear();
  received->owner = std::move(slices);
  return true;
}

template <typename Message>
grpc::ByteBuffer EncodeMessage(const Message& header, const grpc::Slice& rows) {
  const size_t size = header.ByteSizeLong() + SizeOfField(kRows, rows.size()) - rows.size();
  grpc_slice raw = grpc_slice_malloc(size);
  uint8_t* out = header.SerializeWithCachedSizesToArray(GRPC_SLICE_START_PTR(raw));
  if (rows.size() > 0) WriteTagAndSize(kRows, rows.size(), out);
  const std::array<grpc::Slice, 2> slices = {grpc::Slice(raw, grpc::Slice::STEAL_REF), rows};
  return {slices.data(), rows.size() > 0 ? slices.size() : 1};
}

}  // namespace

bool Decode(grpc::ByteBuffer* bytes, ReceivedRows<v1::ReadGradientResponse>* received) {
  return DecodeMessage(bytes, received);
}
bool Decode(grpc::ByteBuffer* bytes, ReceivedRows<v1::ReadWeightsResponse>* received) {
  return DecodeMessage(bytes, received);
}

uint64_t ChecksumOf(std::string_view bias_gradient, std::span<const std::span<const std::byte>> gradient) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, bias_gradient.data(), bias_gradient.size());
  for (const auto part : gradient) XXH3_64bits_update(&state, part.data(), part.size());
  return XXH3_64bits_digest(&state);
}

grpc::ByteBuffer Encode(const v1::ReadGradientResponse& header, const grpc::Slice& rows) {
  return EncodeMessage(header, rows);
}
grpc::ByteBuffer Encode(const v1::ReadWeightsResponse& header, const grpc::Slice& rows) {
  return EncodeMessage(header, rows);
}
grpc::ByteBuffer Encode(const v1::LogitsResponse& header, const grpc::Slice& logits) {
  return EncodeMessage(header, logits);
}

}  // namespace lossd::wire
