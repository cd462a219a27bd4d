// The items of CBOR (RFC 8949) that visited structs are made of: integers, floats, bools, null, byte strings,
// and arrays that say how many items they hold. Each value is written in one way, and read in no other.
// (nlohmann-json's CBOR makes a tree of values and reads strings byte by byte: 40 times as long for a batch.)
#ifndef LOSSD_SERVER_RPC_FIELDS_CBOR_H_
#define LOSSD_SERVER_RPC_FIELDS_CBOR_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace lossd::rpc {

class CborWriter {
 public:
  void Unsigned(uint64_t value);
  void Signed(int64_t value);
  void Bool(bool value);
  void Null();
  // Bit by bit; NaN too.
  void Float(float value);
  void Double(double value);
  void Bytes(absl::string_view bytes);
  // So many items follow.
  void Array(size_t items);

  std::string Take() { return std::move(bytes_); }

 private:
  void Head(uint8_t kind, uint64_t number);
  // Most significant byte first.
  void Number(uint64_t number, int bytes);

  std::string bytes_;
};

// Each call takes the next item if it is one of this kind, and otherwise takes nothing and returns false.
class CborReader {
 public:
  explicit CborReader(absl::string_view bytes) : bytes_(bytes) {}

  bool Unsigned(uint64_t* value);
  bool Signed(int64_t* value);
  bool Bool(bool* value);
  bool Null();
  bool Float(float* value);
  bool Double(double* value);
  // A part of the bytes that are read.
  bool Bytes(absl::string_view* bytes);
  // Never more items than bytes that are left.
  bool Array(uint64_t* items);

  size_t position() const { return position_; }
  bool done() const { return position_ == bytes_.size(); }

 private:
  size_t left() const { return bytes_.size() - position_; }
  bool Head(uint8_t kind, uint64_t* number);
  // A first byte and a number of so many bytes.
  bool Number(uint8_t first, size_t bytes, uint64_t* number);

  absl::string_view bytes_;
  size_t position_ = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_FIELDS_CBOR_H_
