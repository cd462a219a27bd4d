// For tests of structs with Fields (server/engine/common/fields.h): whether every member arrives.
#ifndef LOSSD_TESTS_UNIT_RPC_FIELDS_EVERY_MEMBER_H_
#define LOSSD_TESTS_UNIT_RPC_FIELDS_EVERY_MEMBER_H_

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/fields/fields.h"

namespace lossd::rpc {

struct AnyMember {
  template <class Value>
  operator Value() const;  // NOLINT(google-explicit-constructor)
};
// How many members an aggregate has: with so many values it can be made, and with one more it cannot.
template <class Struct, class... Members>
consteval size_t MembersOf() {
  if constexpr (requires { Struct{Members()..., AnyMember()}; }) {
    return MembersOf<Struct, Members..., AnyMember>();
  } else {
    return sizeof...(Members);
  }
}
// Members that a struct's Fields leave out, because they are meant to.
template <class Struct>
inline constexpr size_t kLeftOut = 0;

// Gives each member a value that it does not have by default. MakeSense(value), where there is one, is called
// with structs of which not all values make sense.
class MemberFiller {
 public:
  template <class... Named>
  void operator()(Named&&... named) {
    FillEach(named...);
  }

  void Fill(bool& value) { value = !value; }
  void Fill(std::string& value) { value = "text " + std::to_string(++last_); }
  void Fill(std::chrono::milliseconds& value) { value = std::chrono::milliseconds(++last_); }
  template <std::integral Value>
  void Fill(Value& value) {
    value = static_cast<Value>(++last_);
  }
  template <std::floating_point Value>
  void Fill(Value& value) {
    value = Value{1} / static_cast<Value>(++last_ + 1);
  }
  template <Enumeration Value>
  void Fill(Value& value) {
    value = static_cast<Value>((static_cast<uint64_t>(value) + 1) % ValuesOf<Value>());
  }
  template <class Value>
  void Fill(std::vector<Value>& values) {
    values.resize(2);
    for (Value& value : values) Fill(value);
  }
  template <class Value, size_t size>
  void Fill(std::array<Value, size>& values) {
    for (Value& value : values) Fill(value);
  }
  template <class Value>
  void Fill(std::map<std::string, Value>& values) {
    Fill(values["a"]);
    Fill(values["b"]);
  }
  template <class Value>
  void Fill(std::optional<Value>& value) {
    Fill(value.emplace());
  }
  template <class Value>
  void Fill(std::shared_ptr<const Value>& value) {
    auto filled = std::make_shared<Value>();
    Fill(*filled);
    value = std::move(filled);
  }
  template <class Struct>
  void Fill(Struct& value) {
    Fields(*this, value);
    if constexpr (requires { MakeSense(value); }) MakeSense(value);
  }

 private:
  void FillEach() {}
  template <class Value, class... Rest>
  void FillEach(const char* /*name*/, Value& value, Rest&&... rest) {
    Fill(value);
    FillEach(rest...);
  }

  int64_t last_ = 0;
};

// Every member as text, by its path. A struct whose Fields leave out a member fails the test.
class MemberTexts {
 public:
  using Texts = std::map<std::string, std::string>;

  template <class Struct>
  static Texts Of(const Struct& value) {
    MemberTexts texts;
    texts.Tell("", value);
    return std::move(texts.texts_);
  }

  template <class... Named>
  void operator()(const Named&... named) {
    told_[path_] = sizeof...(named) / 2;
    TellEach(std::string(path_), named...);
  }

  template <class Value>
  void Tell(const std::string& path, const std::vector<Value>& values) {
    texts_[path] = std::to_string(values.size());
    TellAll(path, values);
  }
  template <class Value, size_t size>
  void Tell(const std::string& path, const std::array<Value, size>& values) {
    TellAll(path, values);
  }
  template <class Value>
  void Tell(const std::string& path, const std::map<std::string, Value>& values) {
    texts_[path] = std::to_string(values.size());
    for (const auto& [key, value] : values) Tell(absl::StrCat(path, ".", key), value);
  }
  template <class Value>
  void Tell(const std::string& path, const std::optional<Value>& value) {
    texts_[path] = value.has_value() ? "one" : "none";
    if (value.has_value()) Tell(path + ".value", *value);
  }
  template <class Value>
  void Tell(const std::string& path, const std::shared_ptr<const Value>& value) {
    texts_[path] = value == nullptr ? "none" : "one";
    if (value != nullptr) Tell(path + ".value", *value);
  }
  template <class Value>
  void Tell(const std::string& path, const Value& value) {
    if constexpr (std::is_class_v<Value> && requires { Fields(*this, value); }) {
      TellStruct(path, value);
    } else {
      texts_[path] = ::testing::PrintToString(value);
    }
  }

 private:
  template <class Struct>
  void TellStruct(const std::string& path, const Struct& value) {
    const std::string outer = std::exchange(path_, path);
    Fields(*this, value);
    path_ = outer;
    if constexpr (std::is_aggregate_v<Struct>) {
      EXPECT_EQ(told_[path], MembersOf<Struct>() - kLeftOut<Struct>) << path << " does not tell every member";
    }
  }
  void TellEach(const std::string& /*path*/) {}
  template <class Value, class... Rest>
  void TellEach(const std::string& path, const char* name, const Value& value, const Rest&... rest) {
    Tell(path + "." + name, value);
    TellEach(path, rest...);
  }
  template <class Values>
  void TellAll(const std::string& path, const Values& values) {
    size_t index = 0;
    for (const auto& value : values) Tell(path + "." + std::to_string(index++), value);
  }

  Texts texts_;
  std::map<std::string, size_t> told_;  // members, by the path of their struct
  std::string path_;
};

// Sends a struct with values of its own in all its members. With a member that its Fields do not tell, or
// whose kind is not carried, this fails.
template <class Sent, class Struct>
void ExpectEveryMemberArrives(const Struct& nothing = {}) {
  Struct filled = nothing;
  MemberFiller().Fill(filled);
  const MemberTexts::Texts by_default = MemberTexts::Of(nothing);
  const MemberTexts::Texts sent = MemberTexts::Of(filled);
  for (const auto& [path, text] : by_default) {
    EXPECT_NE(sent.at(path), text) << path << " is as it is by default";
  }

  const std::string bytes = ToBytes(Sent(filled));
  Sent read;
  ASSERT_EQ(FromBytes(bytes, "message", &read), absl::OkStatus());
  EXPECT_EQ(ToBytes(read), bytes);
  if constexpr (std::is_same_v<Sent, Struct>) {
    EXPECT_EQ(MemberTexts::Of(read), sent);
  } else {
    ASSERT_TRUE(std::holds_alternative<Struct>(read));
    EXPECT_EQ(MemberTexts::Of(std::get<Struct>(read)), sent);
  }
}

}  // namespace lossd::rpc

#endif  // LOSSD_TESTS_UNIT_RPC_FIELDS_EVERY_MEMBER_H_
