#include "proto/wire/field_reader.h"

#include <algorithm>
#include <limits>

namespace lossd::wire {

FieldReader::FieldReader(const std::vector<grpc::Slice>& slices) : slices_(slices) {
  for (const grpc::Slice& slice : slices) at_.remaining += static_cast<int64_t>(slice.size());
}

bool FieldReader::ReadVarint(int most_bytes, uint64_t* value) {
  *value = 0;
  for (int i = 0; i < most_bytes; ++i) {
    if (at_.remaining == 0) return false;
    const auto byte = std::to_integer<uint64_t>(Next(1, &at_).front());
    *value |= (byte & 0x7f) << (7 * i);
    if (byte < 0x80) return true;
  }
  return false;
}

bool FieldReader::ReadTag(uint32_t* tag) {
  uint64_t value = 0;
  if (!ReadVarint(5, &value) || value > std::numeric_limits<uint32_t>::max()) return false;
  *tag = static_cast<uint32_t>(value);
  return *tag >> 3 != 0;
}

bool FieldReader::ReadSize(int64_t* size) {
  uint64_t value = 0;
  if (!ReadVarint(5, &value)) return false;
  *size = static_cast<int64_t>(value);
  return *size <= at_.remaining;
}

bool FieldReader::SkipValue(uint32_t tag) {
  uint64_t number = 0;
  int64_t size = 0;
  switch (tag & 7U) {
    case 0:
      return ReadVarint(10, &number);
    case 1:
      return Skip(8);
    case kLengthDelimited:
      return ReadSize(&size) && Skip(size);
    case 5:
      return Skip(4);
    default:
      return false;  // groups
  }
}

bool FieldReader::Skip(int64_t size) {
  if (size > at_.remaining) return false;
  while (size > 0) size -= static_cast<int64_t>(Next(size, &at_).size());
  return true;
}

void FieldReader::Take(int64_t size, std::vector<std::span<const std::byte>>* parts) {
  while (size > 0) {
    parts->push_back(Next(size, &at_));
    size -= static_cast<int64_t>(parts->back().size());
  }
}

void FieldReader::AppendSince(const Mark& mark, std::string* out) const {
  Mark at = mark;
  while (at.remaining > at_.remaining) {
    const std::span<const std::byte> bytes = Next(at.remaining - at_.remaining, &at);
    out->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
}

std::span<const std::byte> FieldReader::Next(int64_t size, Mark* at) const {
  while (at->offset == slices_[at->slice].size()) {
    ++at->slice;
    at->offset = 0;
  }
  const grpc::Slice& slice = slices_[at->slice];
  const size_t taken = std::min(static_cast<size_t>(size), slice.size() - at->offset);
  const std::span bytes(reinterpret_cast<const std::byte*>(slice.begin()) + at->offset, taken);
  at->offset += taken;
  at->remaining -= static_cast<int64_t>(taken);
  return bytes;
}

}  // namespace lossd::wire
