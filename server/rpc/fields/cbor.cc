#include "server/rpc/fields/cbor.h"

#include <bit>
#include <limits>

namespace lossd::rpc {
namespace {

// The upper three bits of an item's first byte.
constexpr uint8_t kUnsigned = 0;
constexpr uint8_t kNegative = 1;  // −1 − n
constexpr uint8_t kBytes = 2;
constexpr uint8_t kArray = 4;

// Numbers below 24 are in the lower five bits; these say that one, two, four or eight bytes follow.
constexpr uint8_t kOneByte = 24;
constexpr uint8_t kEightBytes = 27;

// Items that are their first byte alone, and those that a float's bits follow.
constexpr uint8_t kFalse = 0xF4;
constexpr uint8_t kTrue = 0xF5;
constexpr uint8_t kNull = 0xF6;
constexpr uint8_t kFloat = 0xFA;
constexpr uint8_t kDouble = 0xFB;

constexpr uint64_t kMostSigned = std::numeric_limits<int64_t>::max();

// The lower five bits for the fewest bytes that hold the number.
uint8_t SizeOf(uint64_t number) {
  if (number < kOneByte) return static_cast<uint8_t>(number);
  if (number <= 0xFF) return kOneByte;
  if (number <= 0xFFFF) return kOneByte + 1;
  return number <= 0xFFFFFFFF ? kOneByte + 2 : kEightBytes;
}

}  // namespace

void CborWriter::Number(uint64_t number, int bytes) {
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) bytes_ += static_cast<char>(number >> shift);
}

void CborWriter::Head(uint8_t kind, uint64_t number) {
  const uint8_t size = SizeOf(number);
  bytes_ += static_cast<char>(kind << 5 | size);
  if (size >= kOneByte) Number(number, 1 << (size - kOneByte));
}

void CborWriter::Unsigned(uint64_t value) { Head(kUnsigned, value); }
void CborWriter::Signed(int64_t value) {
  if (value >= 0) return Unsigned(static_cast<uint64_t>(value));
  Head(kNegative, ~static_cast<uint64_t>(value));
}
void CborWriter::Bool(bool value) { bytes_ += static_cast<char>(value ? kTrue : kFalse); }
void CborWriter::Null() { bytes_ += static_cast<char>(kNull); }
void CborWriter::Float(float value) {
  bytes_ += static_cast<char>(kFloat);
  Number(std::bit_cast<uint32_t>(value), sizeof value);
}
void CborWriter::Double(double value) {
  bytes_ += static_cast<char>(kDouble);
  Number(std::bit_cast<uint64_t>(value), sizeof value);
}
void CborWriter::Bytes(absl::string_view bytes) {
  Head(kBytes, bytes.size());
  bytes_.append(bytes.data(), bytes.size());
}
void CborWriter::Array(size_t items) { Head(kArray, items); }

bool CborReader::Number(uint8_t first, size_t bytes, uint64_t* number) {
  if (left() <= bytes || static_cast<uint8_t>(bytes_[position_]) != first) return false;
  *number = 0;
  for (const char byte : bytes_.substr(position_ + 1, bytes)) {
    *number = *number << 8 | static_cast<uint8_t>(byte);
  }
  position_ += 1 + bytes;
  return true;
}

bool CborReader::Head(uint8_t kind, uint64_t* number) {
  if (done()) return false;
  const auto first = static_cast<uint8_t>(bytes_[position_]);
  const uint8_t size = first & 0x1F;
  if (first >> 5 != kind || size > kEightBytes) return false;
  if (size < kOneByte) {
    *number = size;
    ++position_;
    return true;
  }
  const size_t start = position_;
  if (Number(first, size_t{1} << (size - kOneByte), number) && SizeOf(*number) == size) return true;
  position_ = start;
  return false;
}

bool CborReader::Unsigned(uint64_t* value) { return Head(kUnsigned, value); }
bool CborReader::Signed(int64_t* value) {
  const size_t start = position_;
  uint64_t number = 0;
  const bool negative = Head(kNegative, &number);
  if ((negative || Head(kUnsigned, &number)) && number <= kMostSigned) {
    *value = static_cast<int64_t>(negative ? ~number : number);
    return true;
  }
  position_ = start;
  return false;
}
bool CborReader::Bool(bool* value) {
  uint64_t none = 0;
  *value = Number(kTrue, 0, &none);
  return *value || Number(kFalse, 0, &none);
}
bool CborReader::Null() {
  uint64_t none = 0;
  return Number(kNull, 0, &none);
}
bool CborReader::Float(float* value) {
  uint64_t bits = 0;
  if (!Number(kFloat, sizeof *value, &bits)) return false;
  *value = std::bit_cast<float>(static_cast<uint32_t>(bits));
  return true;
}
bool CborReader::Double(double* value) {
  uint64_t bits = 0;
  if (!Number(kDouble, sizeof *value, &bits)) return false;
  *value = std::bit_cast<double>(bits);
  return true;
}
bool CborReader::Bytes(absl::string_view* bytes) {
  const size_t start = position_;
  uint64_t size = 0;
  if (Head(kBytes, &size) && size <= left()) {
    *bytes = bytes_.substr(position_, size);
    position_ += size;
    return true;
  }
  position_ = start;
  return false;
}
bool CborReader::Array(uint64_t* items) {
  const size_t start = position_;
  if (Head(kArray, items) && *items <= left()) return true;
  position_ = start;
  return false;
}

}  // namespace lossd::rpc
