// Tags and lengths of length-delimited protobuf fields, for messages whose large fields are not copied.
#ifndef LOSSD_PROTO_WIRE_FIELD_WRITER_H_
#define LOSSD_PROTO_WIRE_FIELD_WRITER_H_

#include <google/protobuf/io/coded_stream.h>

#include <cstddef>
#include <cstdint>

#include "proto/wire/field_reader.h"

namespace lossd::wire {

constexpr uint32_t Tag(uint32_t field) { return (field << 3) | FieldReader::kLengthDelimited; }

constexpr size_t SizeOfVarint(size_t value) {
  size_t size = 1;
  for (; value > 0x7f; value >>= 7) ++size;
  return size;
}

// Tag, length and content; nothing for an empty field, as the generated classes do.
constexpr size_t SizeOfField(uint32_t field, size_t size) {
  return size == 0 ? 0 : SizeOfVarint(Tag(field)) + SizeOfVarint(size) + size;
}

inline uint8_t* WriteTagAndSize(uint32_t field, size_t size, uint8_t* out) {
  out = google::protobuf::io::CodedOutputStream::WriteVarint32ToArray(Tag(field), out);
  return google::protobuf::io::CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(size), out);
}

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_FIELD_WRITER_H_
