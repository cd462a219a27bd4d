#include "server/rpc/fields/fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "server/engine/common/errors.h"
#include "server/engine/common/fields.h"

namespace lossd::rpc::fields_test {

using engine::Is;
using std::chrono::milliseconds;
using ::testing::HasSubstr;

enum class Color { kRed, kGreen, kBlue };

struct Point {
  int8_t x = 0;
  uint16_t y = 0;
  bool operator==(const Point&) const = default;
};
template <class Visit>
void Fields(Visit& visit, Is<Point> auto& point) {
  auto& [x, y] = point;
  visit("x", x, "y", y);
}
const char* FaultOf(const Point& point) { return point.x == 13 ? "has x 13; nothing has" : nullptr; }

struct Nothing {
  bool operator==(const Nothing&) const = default;
};
template <class Visit>
void Fields(Visit& visit, Is<Nothing> auto& /*nothing*/) {
  visit();
}

using Either = std::variant<Nothing, Point>;
const char* NameOf(const Either& either) { return either.index() == 0 ? "Nothing" : "Point"; }

struct Everything {
  bool yes = false;
  int64_t number = 0;
  float single = 0;
  double wide = 0;
  std::string text;
  Color color = Color::kRed;
  milliseconds time{0};
  std::optional<float> maybe;
  std::shared_ptr<const std::vector<float>> shared;
  std::vector<Point> points;
  std::array<int32_t, 2> pair{};
  std::map<std::string, Point> named;
  Either either;
};
template <class Visit>
void Fields(Visit& visit, Is<Everything> auto& all) {
  auto& [yes, number, single, wide, text, color, time, maybe, shared, points, pair, named, either] = all;
  visit("yes", yes, "number", number, "single", single, "wide", wide, "text", text, "color", color, "time",
        time, "maybe", maybe, "shared", shared, "points", points, "pair", pair, "named", named, "either",
        either);
}

Everything Example() {
  return {.yes = true,
          .number = std::numeric_limits<int64_t>::min(),
          .single = 0.1f,
          .wide = 0.1,
          .text = std::string("a\0\xFF", 3),
          .color = Color::kBlue,
          .time = milliseconds(-7),
          .maybe = -0.0f,
          .shared = std::make_shared<const std::vector<float>>(std::vector<float>{1.5f, 2.5f}),
          .points = {{-128, 65535}, {127, 0}},
          .pair = {-1, 500},
          .named = {{"a", {1, 2}}, {"b", {3, 4}}},
          .either = Point{5, 6}};
}

TEST(Fields, EveryKindOfMemberArrives) {
  const Everything sent = Example();
  Everything read;
  ASSERT_EQ(FromBytes(ToBytes(sent), "thing", &read), absl::OkStatus());
  EXPECT_TRUE(read.yes);
  EXPECT_EQ(read.number, sent.number);
  EXPECT_EQ(read.single, sent.single);
  EXPECT_EQ(read.wide, sent.wide);
  EXPECT_EQ(read.text, sent.text);
  EXPECT_EQ(read.color, sent.color);
  EXPECT_EQ(read.time, sent.time);
  ASSERT_TRUE(read.maybe.has_value());
  EXPECT_TRUE(std::signbit(*read.maybe));
  ASSERT_NE(read.shared, nullptr);
  EXPECT_EQ(*read.shared, *sent.shared);
  EXPECT_EQ(read.points, sent.points);
  EXPECT_EQ(read.pair, sent.pair);
  EXPECT_EQ(read.named, sent.named);
  EXPECT_EQ(read.either, sent.either);
}

// What is not there replaces what was.
TEST(Fields, WhatIsEmptyArrives) {
  Everything read = Example();
  ASSERT_EQ(FromBytes(ToBytes(Everything()), "thing", &read), absl::OkStatus());
  EXPECT_EQ(ToBytes(read), ToBytes(Everything()));
  EXPECT_FALSE(read.maybe.has_value());
  EXPECT_EQ(read.shared, nullptr);
  EXPECT_EQ(read.either, Either(Nothing()));
}

TEST(Fields, OnlyWholeBytesAreRead) {
  const std::string bytes = ToBytes(Example());
  Everything read;
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(FromBytes(bytes.substr(0, size), "thing", &read).code(), absl::StatusCode::kInvalidArgument)
        << size;
  }
  const absl::Status more = FromBytes(bytes + '\0', "thing", &read);
  EXPECT_THAT(std::string(more.message()), HasSubstr("thing is followed by more bytes"));
  EXPECT_EQ(engine::ReasonOf(more), engine::RejectReason::kMalformed);
}

// One way to write each value: what is read as anything is written as it came.
TEST(Fields, ADamagedByteIsRefusedOrIsAnotherValue) {
  const std::string bytes = ToBytes(Example());
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(value);
      Everything read;
      if (!FromBytes(damaged, "thing", &read).ok()) continue;
      EXPECT_EQ(ToBytes(read), damaged) << "byte " << at << " is " << value;
    }
  }
}

template <class Value, class Sent>
std::string Refused(const Sent& sent) {
  Value read;
  return std::string(FromBytes(ToBytes(sent), "thing", &read).message());
}

TEST(Fields, MessagesNameTheMember) {
  EXPECT_THAT(Refused<Point>(std::array<int, 2>{128, 0}),
              HasSubstr("thing.x is no integer, or one that its type"));
  EXPECT_THAT(Refused<Point>(std::array<int, 2>{0, -1}), HasSubstr("thing.y is no integer"));
  EXPECT_THAT(Refused<Point>(std::array<int, 2>{0, 65536}), HasSubstr("thing.y is no integer"));
  EXPECT_THAT(Refused<Point>(std::array<int, 3>{}), HasSubstr("thing has not the members"));
  EXPECT_THAT(Refused<Point>(std::array<int, 1>{}), HasSubstr("thing has not the members"));
  EXPECT_THAT(Refused<Point>(Point{13, 0}), HasSubstr("thing has x 13; nothing has, at byte 3"));
  EXPECT_THAT(Refused<Color>(3), HasSubstr("thing is no value of its enum"));
  EXPECT_THAT(Refused<Color>(-1), HasSubstr("thing is no value of its enum"));
  EXPECT_THAT(Refused<std::vector<Point>>(std::array{Point{1, 1}, Point{13, 1}}),
              HasSubstr("thing[1] has x 13"));
  EXPECT_THAT(Refused<Either>(std::pair{2, Nothing()}), HasSubstr("thing is no alternative"));
  EXPECT_THAT(Refused<Either>(Either(Point{13, 0})), HasSubstr("thing.Point has x 13"));
  EXPECT_THAT(Refused<std::vector<float>>(std::string("abc")),
              HasSubstr("thing is no string of bytes, or its length"));
  using Named = std::map<std::string, int>;
  using Pairs = std::vector<std::pair<std::string, std::string>>;
  EXPECT_THAT(Refused<Named>(Pairs{{"a", "b"}}), HasSubstr("thing[0].value is no integer"));
  using Keyed = std::map<std::string, std::string>;
  EXPECT_THAT(Refused<Keyed>(Pairs{{"b", ""}, {"a", ""}}), HasSubstr("thing has keys that do not ascend"));
  EXPECT_THAT(Refused<Keyed>(Pairs{{"a", ""}, {"a", ""}}), HasSubstr("thing has keys that do not ascend"));
}

// Lengths that nothing follows, and arrays in arrays: neither memory nor stack is taken for them.
TEST(Fields, WhatIsOnlySaidToBeThereTakesNothing) {
  std::vector<std::vector<Point>> read;
  for (const absl::string_view bytes : {"\x9B\x7F\xFF\xFF\xFF\xFF\xFF\xFF\xFF",
                                        "\x81\x9B\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", "\x9A\xFF\xFF\xFF\xFF"}) {
    EXPECT_FALSE(FromBytes(bytes, "thing", &read).ok());
  }
  const absl::Status deep = FromBytes(std::string(1 << 20, '\x81'), "thing", &read);
  EXPECT_THAT(std::string(deep.message()), HasSubstr("thing[0][0] has not the members"));
}

}  // namespace lossd::rpc::fields_test
