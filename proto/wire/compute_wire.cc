#include "proto/wire/compute_wire.h"

#include <grpc/slice.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "proto/wire/field_reader.h"
#include "proto/wire/field_writer.h"

namespace lossd::wire {
namespace {

using google::protobuf::MessageLite;

// Chunk in ComputeRequest and ChunkResult in ComputeResponse, and their tensors, have the same numbers.
constexpr uint32_t kOuter = v1::ComputeRequest::kChunkFieldNumber;
constexpr uint32_t kSmall = v1::Chunk::kLabelsFieldNumber;
constexpr uint32_t kLarge = v1::Chunk::kHiddenStatesFieldNumber;
// The third one is a chunk's alone.
template <typename Message>
constexpr uint32_t kExtra = 0;
template <>
constexpr uint32_t kExtra<v1::ComputeRequest> = v1::Chunk::kTeacherHiddenStatesFieldNumber;
static_assert(kOuter == v1::ComputeResponse::kResultFieldNumber);
static_assert(kSmall == v1::ChunkResult::kLossesFieldNumber);
static_assert(kLarge == v1::ChunkResult::kDxFieldNumber);

struct Body {
  std::string rest;  // its fields that are no tensors, one after the other
  Tensor small;
  Tensor large;
  Tensor extra;

  // The one of this tag, or null.
  Tensor* Of(uint32_t tag, uint32_t extra_field) {
    if (tag == Tag(kSmall)) return &small;
    if (tag == Tag(kLarge)) return &large;
    return extra_field != 0 && tag == Tag(extra_field) ? &extra : nullptr;
  }
};

// False if the message is anything but one field kOuter of plain fields, be it valid or not.
bool Split(const std::vector<grpc::Slice>& slices, uint32_t extra_field, Body* body) {
  FieldReader reader(slices);
  uint32_t tag = 0;
  int64_t size = 0;
  if (!reader.ReadTag(&tag) || tag != Tag(kOuter) || !reader.ReadSize(&size) || size != reader.remaining()) {
    return false;
  }
  while (reader.remaining() > 0) {
    const FieldReader::Mark begin = reader.mark();
    if (!reader.ReadTag(&tag)) return false;
    if (Tensor* const tensor = body->Of(tag, extra_field); tensor != nullptr) {
      tensor->parts.clear();  // the last one counts
      if (!reader.ReadSize(&tensor->bytes)) return false;
      reader.Take(tensor->bytes, &tensor->parts);
    } else {
      if (!reader.SkipValue(tag)) return false;
      reader.AppendSince(begin, &body->rest);
    }
  }
  return true;
}

// Slices next to each other of one block count once; a block holds at least what is seen of it.
int64_t KeptBytes(const std::vector<grpc::Slice>& slices) {
  int64_t kept = 0;
  int64_t of_block = 0;
  const void* block = nullptr;
  for (const grpc::Slice& slice : slices) {
    const grpc_slice raw = slice.c_slice();
    const void* const its_block = raw.refcount;
    grpc_slice_unref(raw);
    if (its_block == nullptr) continue;  // inside the slice itself
    if (its_block != block) {
      kept += std::max(of_block, block == nullptr ? 0 : kReadBlockBytes);
      of_block = 0;
      block = its_block;
    }
    of_block += static_cast<int64_t>(slice.size());
  }
  kept += std::max(of_block, block == nullptr ? 0 : kReadBlockBytes);
  return kept + static_cast<int64_t>(slices.size() * sizeof(grpc::Slice));
}

// The inner messages of both kinds, by the same names.
v1::Chunk* MutableBody(v1::ComputeRequest* request) { return request->mutable_chunk(); }
v1::ChunkResult* MutableBody(v1::ComputeResponse* response) { return response->mutable_result(); }
bool HasBody(const v1::ComputeRequest& request) { return request.has_chunk(); }
bool HasBody(const v1::ComputeResponse& response) { return response.has_result(); }
std::string* MutableSmall(v1::Chunk* chunk) { return chunk->mutable_labels(); }
std::string* MutableSmall(v1::ChunkResult* result) { return result->mutable_losses(); }
std::string* MutableLarge(v1::Chunk* chunk) { return chunk->mutable_hidden_states(); }
std::string* MutableLarge(v1::ChunkResult* result) { return result->mutable_dx(); }
std::string TakeExtra(v1::Chunk* chunk) { return std::exchange(*chunk->mutable_teacher_hidden_states(), {}); }
std::string TakeExtra(v1::ChunkResult* /*result*/) { return {}; }

Tensor TensorOf(const std::string& bytes) {
  Tensor tensor;
  tensor.bytes = static_cast<int64_t>(bytes.size());
  if (!bytes.empty()) tensor.parts.push_back(std::as_bytes(std::span(bytes)));
  return tensor;
}

// By the generated parser, which copies the tensors.
template <typename Message>
bool DecodeOther(grpc::ByteBuffer* bytes, Received<Message>* received) {
  if (!grpc::SerializationTraits<Message>::Deserialize(bytes, &received->message).ok()) return false;
  if (!HasBody(received->message)) return true;
  auto* body = MutableBody(&received->message);
  auto tensors = std::make_shared<std::array<std::string, 3>>();
  tensors->at(0) = std::move(*MutableSmall(body));
  tensors->at(1) = std::move(*MutableLarge(body));
  tensors->at(2) = TakeExtra(body);
  MutableSmall(body)->clear();
  MutableLarge(body)->clear();
  received->small = TensorOf(tensors->at(0));
  received->large = TensorOf(tensors->at(1));
  received->extra = TensorOf(tensors->at(2));
  received->kept_bytes = received->small.bytes + received->large.bytes + received->extra.bytes;
  received->owner = std::move(tensors);
  return true;
}

template <typename Message>
bool DecodeMessage(grpc::ByteBuffer* bytes, Received<Message>* received) {
  received->Clear();
  auto slices = std::make_shared<std::vector<grpc::Slice>>();
  if (!bytes->Valid() || !bytes->Dump(slices.get()).ok()) return false;
  Body body;
  if (!Split(*slices, kExtra<Message>, &body) ||
      !MutableBody(&received->message)->ParseFromString(body.rest)) {
    received->Clear();
    slices.reset();
    return DecodeOther(bytes, received);
  }
  bytes->Clear();
  received->small = std::move(body.small);
  received->large = std::move(body.large);
  received->extra = std::move(body.extra);
  received->kept_bytes = KeptBytes(*slices);
  received->owner = std::move(slices);
  return true;
}

grpc::Slice TagAndSize(uint32_t field, size_t size) {
  grpc_slice raw = grpc_slice_malloc(SizeOfField(field, size) - size);
  WriteTagAndSize(field, size, GRPC_SLICE_START_PTR(raw));
  return grpc::Slice(raw, grpc::Slice::STEAL_REF);
}

size_t SizeOfAll(std::span<const grpc::Slice> slices) {
  size_t size = 0;
  for (const grpc::Slice& slice : slices) size += slice.size();
  return size;
}

// `behind` is the rest of the body's bytes.
grpc::ByteBuffer EncodeMessage(const MessageLite& header, std::span<const std::byte> small,
                               std::span<const grpc::Slice> large, std::span<const grpc::Slice> behind = {}) {
  const size_t large_size = SizeOfAll(large);
  const size_t referred = large_size + SizeOfAll(behind);
  const size_t rest = header.ByteSizeLong();
  const size_t body =
      rest + SizeOfField(kSmall, small.size()) + SizeOfField(kLarge, large_size) + SizeOfAll(behind);
  grpc_slice raw = grpc_slice_malloc(SizeOfVarint(Tag(kOuter)) + SizeOfVarint(body) + body - referred);
  uint8_t* out = WriteTagAndSize(kOuter, body, GRPC_SLICE_START_PTR(raw));
  out = header.SerializeWithCachedSizesToArray(out);
  if (!small.empty()) {
    out = WriteTagAndSize(kSmall, small.size(), out);
    std::memcpy(out, small.data(), small.size());
    out += small.size();
  }
  if (large_size > 0) WriteTagAndSize(kLarge, large_size, out);
  std::vector<grpc::Slice> slices;
  slices.reserve(1 + large.size() + behind.size());
  slices.emplace_back(raw, grpc::Slice::STEAL_REF);
  if (large_size > 0) slices.insert(slices.end(), large.begin(), large.end());
  slices.insert(slices.end(), behind.begin(), behind.end());
  return {slices.data(), slices.size()};
}

}  // namespace

bool Decode(grpc::ByteBuffer* bytes, ReceivedRequest* received) { return DecodeMessage(bytes, received); }
bool Decode(grpc::ByteBuffer* bytes, ReceivedResponse* received) { return DecodeMessage(bytes, received); }

grpc::ByteBuffer Encode(const v1::Chunk& header, std::span<const std::byte> labels,
                        std::span<const grpc::Slice> hidden_states,
                        std::span<const grpc::Slice> teacher_hidden_states) {
  const size_t teacher_size = SizeOfAll(teacher_hidden_states);
  if (teacher_size == 0) return EncodeMessage(header, labels, hidden_states);
  std::vector<grpc::Slice> extra = {TagAndSize(kExtra<v1::ComputeRequest>, teacher_size)};
  extra.insert(extra.end(), teacher_hidden_states.begin(), teacher_hidden_states.end());
  return EncodeMessage(header, labels, hidden_states, extra);
}

grpc::ByteBuffer Encode(const v1::Chunk& header, std::span<const std::byte> labels,
                        const grpc::Slice& hidden_states, const grpc::Slice& teacher_hidden_states) {
  return Encode(header, labels, std::span(&hidden_states, 1), std::span(&teacher_hidden_states, 1));
}

grpc::ByteBuffer Encode(const v1::ChunkResult& header, std::span<const std::byte> losses,
                        const grpc::Slice& dx) {
  return EncodeMessage(header, losses, {&dx, 1});
}

}  // namespace lossd::wire
