#include "client/src/chunk_codec.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "google/protobuf/io/coded_stream.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace lossd::internal {
namespace {

using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t kLengthDelimited = 2;
constexpr uint32_t Tag(int field) { return (static_cast<uint32_t>(field) << 3) | kLengthDelimited; }

uint8_t* WriteBytes(uint32_t tag, std::span<const std::byte> bytes, uint8_t* out) {
  out = CodedOutputStream::WriteVarint32ToArray(tag, out);
  out = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(bytes.size()), out);
  std::memcpy(out, bytes.data(), bytes.size());
  return out + bytes.size();
}

size_t SizeOfBytes(uint32_t tag, size_t size) {
  return CodedOutputStream::VarintSize32(tag) + CodedOutputStream::VarintSize32(static_cast<uint32_t>(size)) +
         size;
}

// Moves one field, whose tag was read already, from the stream to `out`.
bool CopyField(CodedInputStream* input, uint32_t tag, std::string* out) {
  const auto append_varint = [out](uint64_t value) {
    uint8_t bytes[10];
    const uint8_t* end = CodedOutputStream::WriteVarint64ToArray(value, bytes);
    out->append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(end - bytes));
  };
  append_varint(tag);
  std::string raw;
  switch (tag & 7U) {
    case 0: {
      uint64_t value = 0;
      if (!input->ReadVarint64(&value)) return false;
      append_varint(value);
      return true;
    }
    case 1:
    case 5:
      if (!input->ReadString(&raw, (tag & 7U) == 1 ? 8 : 4)) return false;
      out->append(raw);
      return true;
    case kLengthDelimited: {
      uint32_t size = 0;
      if (!input->ReadVarint32(&size) || !input->ReadString(&raw, static_cast<int>(size))) return false;
      append_varint(size);
      out->append(raw);
      return true;
    }
    default:
      return false;  // groups: nothing in lossd.v1 has them
  }
}

}  // namespace

// Separates a serialised ComputeResponse into its small fields and the places of its tensors.
class ResponseParser {
 public:
  ResponseParser(grpc::ByteBuffer* buffer, DecodedResponse* response)
      : reader_(buffer), input_(&reader_), response_(response) {}

  bool Parse() {
    std::string rest;
    while (const uint32_t tag = input_.ReadTag()) {
      const bool ok = tag == Tag(v1::ComputeResponse::kResultFieldNumber) ? ParseResult()
                                                                          : CopyField(&input_, tag, &rest);
      if (!ok) return false;
    }
    return input_.ConsumedEntireMessage() && response_->header_.MergeFromString(rest);
  }

 private:
  bool ParseResult() {
    uint32_t size = 0;
    if (!input_.ReadVarint32(&size)) return false;
    const auto limit = input_.PushLimit(static_cast<int>(size));
    std::string rest;
    while (const uint32_t tag = input_.ReadTag()) {
      bool ok = false;
      if (tag == Tag(v1::ChunkResult::kLossesFieldNumber)) {
        ok = SkipTensor(&response_->losses_);
      } else if (tag == Tag(v1::ChunkResult::kDxFieldNumber)) {
        ok = SkipTensor(&response_->dx_);
      } else {
        ok = CopyField(&input_, tag, &rest);
      }
      if (!ok) return false;
    }
    if (input_.BytesUntilLimit() != 0) return false;
    input_.PopLimit(limit);
    return response_->header_.mutable_result()->MergeFromString(rest);
  }

  bool SkipTensor(DecodedResponse::Range* range) {
    uint32_t size = 0;
    if (!input_.ReadVarint32(&size)) return false;
    *range = {.begin = input_.CurrentPosition(), .size = size};
    return input_.Skip(static_cast<int>(size));
  }

  grpc::ProtoBufferReader reader_;
  CodedInputStream input_;
  DecodedResponse* response_;
};

absl::StatusOr<DecodedResponse> DecodedResponse::Decode(grpc::ByteBuffer* buffer) {
  DecodedResponse response;
  if (!buffer->Valid() || !buffer->Dump(&response.slices_).ok() ||
      !ResponseParser(buffer, &response).Parse()) {
    return absl::InternalError("the server sent a message that is not a lossd.v1.ComputeResponse");
  }
  return response;
}

void DecodedResponse::Copy(Range range, std::span<std::byte> target) const {
  int64_t slice_begin = 0;
  for (const grpc::Slice& slice : slices_) {
    const auto slice_size = static_cast<int64_t>(slice.size());
    const int64_t from = std::max(range.begin, slice_begin);
    const int64_t to = std::min(range.begin + range.size, slice_begin + slice_size);
    if (from < to) {
      std::memcpy(target.data() + (from - range.begin), slice.begin() + (from - slice_begin),
                  static_cast<size_t>(to - from));
    }
    slice_begin += slice_size;
  }
}

grpc::ByteBuffer EncodeStart(const v1::ComputeStart& start) {
  v1::ComputeRequest request;
  *request.mutable_start() = start;
  const grpc::Slice slice(request.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer EncodeChunk(const v1::Chunk& header, std::span<const std::byte> labels,
                             std::span<const std::byte> hidden_states) {
  constexpr uint32_t kChunkTag = Tag(v1::ComputeRequest::kChunkFieldNumber);
  constexpr uint32_t kLabelsTag = Tag(v1::Chunk::kLabelsFieldNumber);
  constexpr uint32_t kHiddenTag = Tag(v1::Chunk::kHiddenStatesFieldNumber);
  const std::string small = header.SerializeAsString();
  const size_t chunk_size =
      small.size() + SizeOfBytes(kLabelsTag, labels.size()) + SizeOfBytes(kHiddenTag, hidden_states.size());

  grpc_slice raw = grpc_slice_malloc(SizeOfBytes(kChunkTag, chunk_size));
  uint8_t* out = GRPC_SLICE_START_PTR(raw);
  out = CodedOutputStream::WriteVarint32ToArray(kChunkTag, out);
  out = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(chunk_size), out);
  out = std::copy(small.begin(), small.end(), out);
  out = WriteBytes(kLabelsTag, labels, out);
  WriteBytes(kHiddenTag, hidden_states, out);
  const grpc::Slice slice(raw, grpc::Slice::STEAL_REF);
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace lossd::internal
