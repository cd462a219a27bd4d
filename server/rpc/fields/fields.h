// Structs as bytes and back, by their Fields (server/engine/common/fields.h): for processes of one version,
// which is checked before. A struct is an array of its members in their order; their names are for messages.
//
// Bytes may come from anybody. What is not written in this very way is refused; what reading allocates is in
// proportion to the bytes that are there, whatever they say of lengths; and it goes as deep as types do.
#ifndef LOSSD_SERVER_RPC_FIELDS_FIELDS_H_
#define LOSSD_SERVER_RPC_FIELDS_FIELDS_H_

#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/rpc/fields/cbor.h"

namespace lossd::rpc {

// The values of an enum, which count from 0 without gaps: the compiler knows those that have names.
template <auto value>
consteval bool IsNamed() {
  // "[with auto value = Color::kRed]", or without a name "[with auto value = (Color)7]".
  constexpr std::string_view kEquals = "value = ";
  const std::string_view text = __PRETTY_FUNCTION__;
  return text[text.rfind(kEquals) + kEquals.size()] != '(';
}
template <class Enum, int value = 0>
consteval uint64_t ValuesOf() {
  if constexpr (IsNamed<static_cast<Enum>(value)>()) {
    return ValuesOf<Enum, value + 1>();
  } else {
    return value;
  }
}

template <class Value>
concept Enumeration = std::is_enum_v<Value>;
// Vectors of these are the bytes that they are in memory.
template <class Value>
concept Number = (std::integral<Value> || std::floating_point<Value>)&&!std::same_as<Value, bool>;

// The visitor that writes.
class FieldWriter {
 public:
  template <class... Named>
  void operator()(const Named&... named) {
    cbor_.Array(sizeof...(named) / 2);
    WriteEach(named...);
  }

  void Write(bool value) { cbor_.Bool(value); }
  void Write(float value) { cbor_.Float(value); }
  void Write(double value) { cbor_.Double(value); }
  void Write(const std::string& bytes) { cbor_.Bytes(bytes); }
  void Write(std::chrono::milliseconds time) { cbor_.Signed(time.count()); }
  void Write(const std::signed_integral auto& value) { cbor_.Signed(value); }
  void Write(const std::unsigned_integral auto& value) { cbor_.Unsigned(value); }
  void Write(const Enumeration auto& value) { cbor_.Unsigned(static_cast<uint64_t>(value)); }
  template <Number Value>
  void Write(const std::vector<Value>& values) {
    cbor_.Bytes({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)});
  }
  template <class Value>
  void Write(const std::vector<Value>& values) {
    WriteAll(values);
  }
  template <class Value, size_t size>
  void Write(const std::array<Value, size>& values) {
    WriteAll(values);
  }
  template <class Value>
  void Write(const std::map<std::string, Value>& values) {
    WriteAll(values);
  }
  template <class First, class Second>
  void Write(const std::pair<First, Second>& pair) {
    cbor_.Array(2);
    Write(pair.first);
    Write(pair.second);
  }
  template <class Value>
  void Write(const std::optional<Value>& value) {
    WriteIf(value.has_value() ? &*value : nullptr);
  }
  template <class Value>
  void Write(const std::shared_ptr<const Value>& value) {
    WriteIf(value.get());
  }
  template <class... Values>
  void Write(const std::variant<Values...>& value) {
    cbor_.Array(2);
    Write(value.index());
    std::visit([this](const auto& one) { this->Write(one); }, value);
  }
  template <class Struct>
  void Write(const Struct& value) {
    Fields(*this, value);
  }

  std::string Take() { return cbor_.Take(); }

 private:
  void WriteEach() {}
  template <class Value, class... Rest>
  void WriteEach(const char* /*name*/, const Value& value, const Rest&... rest) {
    Write(value);
    WriteEach(rest...);
  }
  template <class Values>
  void WriteAll(const Values& values) {
    cbor_.Array(values.size());
    for (const auto& value : values) Write(value);
  }
  template <class Value>
  void WriteIf(const Value* value) {
    if (value == nullptr) return cbor_.Null();
    Write(*value);
  }

  CborWriter cbor_;
};

// The visitor that reads. Once something is wrong it reads nothing more.
class FieldReader {
 public:
  // `what`: of what messages speak, "command".
  FieldReader(absl::string_view bytes, const char* what) : cbor_(bytes), what_(what) {}

  template <class... Named>
  void operator()(Named&&... named) {
    if (ReadItems(sizeof...(named) / 2)) ReadEach(named...);
  }

  void Read(bool& value) { Take(cbor_.Bool(&value), "is no bool"); }
  void Read(float& value) { Take(cbor_.Float(&value), "is no float of 32 bits"); }
  void Read(double& value) { Take(cbor_.Double(&value), "is no float of 64 bits"); }
  void Read(std::string& bytes) {
    absl::string_view read;
    if (Take(cbor_.Bytes(&read), kNoBytes)) bytes.assign(read.data(), read.size());
  }
  void Read(std::chrono::milliseconds& time) {
    int64_t count = 0;
    Read(count);
    time = std::chrono::milliseconds(count);
  }
  template <std::integral Value>
  void Read(Value& value) {
    std::conditional_t<std::signed_integral<Value>, int64_t, uint64_t> read = 0;
    bool there = false;
    if constexpr (std::signed_integral<Value>) {
      there = cbor_.Signed(&read);
    } else {
      there = cbor_.Unsigned(&read);
    }
    if (Take(there && std::in_range<Value>(read), "is no integer, or one that its type cannot hold")) {
      value = static_cast<Value>(read);
    }
  }
  template <Enumeration Value>
  void Read(Value& value) {
    static_assert(ValuesOf<Value>() > 0);
    uint64_t read = 0;
    if (Take(cbor_.Unsigned(&read) && read < ValuesOf<Value>(), "is no value of its enum")) {
      value = static_cast<Value>(read);
    }
  }
  template <Number Value>
  void Read(std::vector<Value>& values) {
    absl::string_view bytes;
    if (!Take(cbor_.Bytes(&bytes) && bytes.size() % sizeof(Value) == 0, kNoBytes)) return;
    values.resize(bytes.size() / sizeof(Value));
    bytes.copy(reinterpret_cast<char*>(values.data()), bytes.size());
  }
  template <class Value>
  void Read(std::vector<Value>& values) {
    values.clear();
    const uint64_t size = ReadSize();
    for (uint64_t i = 0; ok() && i < size; ++i) ReadAt(i, values.emplace_back());
  }
  template <class Value, size_t size>
  void Read(std::array<Value, size>& values) {
    if (!ReadItems(size)) return;
    for (size_t i = 0; ok() && i < size; ++i) ReadAt(i, values[i]);
  }
  // Keys ascend, as they are written.
  template <class Value>
  void Read(std::map<std::string, Value>& values) {
    values.clear();
    const uint64_t size = ReadSize();
    while (ok() && values.size() < size) {
      std::pair<std::string, Value> next;
      ReadAt(values.size(), next);
      const bool ascends = values.empty() || values.rbegin()->first < next.first;
      if (Take(ascends, "has keys that do not ascend")) values.insert(values.end(), std::move(next));
    }
  }
  template <class First, class Second>
  void Read(std::pair<First, Second>& pair) {
    if (ReadItems(2)) ReadEach("key", pair.first, "value", pair.second);
  }
  template <class Value>
  void Read(std::optional<Value>& value) {
    value.reset();
    if (!cbor_.Null()) Read(value.emplace());
  }
  template <class Value>
  void Read(std::shared_ptr<const Value>& value) {
    value.reset();
    if (cbor_.Null()) return;
    auto read = std::make_shared<Value>();
    Read(*read);
    value = std::move(read);
  }
  // Its alternatives have names: NameOf(variant), found where they are from.
  template <class... Values>
  void Read(std::variant<Values...>& value) {
    if (!ReadItems(2)) return;
    uint64_t index = 0;
    if (!Take(cbor_.Unsigned(&index) && index < sizeof...(Values), "is no alternative of a variant")) return;
    Choose(value, index, std::index_sequence_for<Values...>());
    std::visit([&](auto& one) { ReadEach(NameOf(value), one); }, value);
  }
  template <class Struct>
  void Read(Struct& value) {
    Fields(*this, value);
    if constexpr (requires { FaultOf(value); }) {
      const char* const fault = ok() ? FaultOf(value) : nullptr;
      Take(fault == nullptr, fault);
    }
  }

  bool ok() const { return error_.ok(); }
  // Behind the last item.
  absl::Status Finish();

 private:
  static constexpr const char* kNoBytes = "is no string of bytes, or its length is wrong";

  // Where the member that is read is.
  struct Place {
    const Place* outer = nullptr;
    const char* name = nullptr;  // null: an element
    size_t index = 0;
  };

  void ReadEach() {}
  template <class Value, class... Rest>
  void ReadEach(const char* name, Value& value, Rest&&... rest) {
    ReadAt({place_, name}, value);
    ReadEach(rest...);
  }
  template <class Value>
  void ReadAt(size_t index, Value& value) {
    ReadAt({place_, nullptr, index}, value);
  }
  template <class Value>
  void ReadAt(const Place& place, Value& value) {
    if (!ok()) return;
    place_ = &place;
    Read(value);
    place_ = place.outer;
  }
  template <class Variant, size_t... indices>
  static void Choose(Variant& value, uint64_t index, std::index_sequence<indices...> /*all*/) {
    ((indices == index ? static_cast<void>(value.template emplace<indices>()) : void()), ...);
  }
  uint64_t ReadSize() {
    uint64_t size = 0;
    Take(cbor_.Array(&size), "is no array, or one of more than is there");
    return size;
  }
  bool ReadItems(uint64_t expected) {
    return Take(ReadSize() == expected, "has not the members that it has here");
  }

  // Says that this is wrong, unless it is right or something else was wrong before.
  bool Take(bool right, const char* wrong) {
    if (!right) Fail(wrong);
    return ok();
  }
  void Fail(const char* wrong);

  CborReader cbor_;
  const char* const what_;
  const Place* place_ = nullptr;
  absl::Status error_;
};

template <class Value>
std::string ToBytes(const Value& value) {
  FieldWriter writer;
  writer.Write(value);
  return writer.Take();
}

// INVALID_ARGUMENT if the bytes are not what ToBytes() makes of a value without faults; it names the member.
// `*value` is then anything.
template <class Value>
absl::Status FromBytes(absl::string_view bytes, const char* what, Value* value) {
  FieldReader reader(bytes, what);
  reader.Read(*value);
  return reader.Finish();
}

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_FIELDS_FIELDS_H_
