#include "server/rpc/fields/cbor.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace lossd::rpc::cbor_test {

using nlohmann::json;

template <class... Arguments, class... Given>
std::string Written(void (CborWriter::*put)(Arguments...), const Given&... given) {
  CborWriter writer;
  (writer.*put)(given...);
  return writer.Take();
}

// Items as another implementation of the standard writes them.
std::string Expected(const json& value) {
  const std::vector<uint8_t> bytes = json::to_cbor(value);
  return {bytes.begin(), bytes.end()};
}

TEST(Cbor, NumbersAreAsTheStandardHasThem) {
  for (const uint64_t one : {0U, 1U, 23U, 24U, 255U, 256U, 65535U, 65536U, 4294967295U}) {
    for (const uint64_t value : {one, one << 32, ~one}) {
      const std::string bytes = Written(&CborWriter::Unsigned, value);
      EXPECT_EQ(bytes, Expected(value)) << value;
      CborReader reader(bytes);
      uint64_t read = 0;
      EXPECT_TRUE(reader.Unsigned(&read) && reader.done()) << value;
      EXPECT_EQ(read, value);
    }
    for (const int64_t value : {static_cast<int64_t>(one), -static_cast<int64_t>(one),
                                std::numeric_limits<int64_t>::max() - static_cast<int64_t>(one),
                                std::numeric_limits<int64_t>::min() + static_cast<int64_t>(one)}) {
      const std::string bytes = Written(&CborWriter::Signed, value);
      EXPECT_EQ(bytes, Expected(value)) << value;
      CborReader reader(bytes);
      int64_t read = 0;
      EXPECT_TRUE(reader.Signed(&read) && reader.done()) << value;
      EXPECT_EQ(read, value);
    }
  }
}

TEST(Cbor, FloatsKeepTheirBits) {
  using Limits = std::numeric_limits<float>;
  for (const float value : {0.0f, -0.0f, 0.1f, Limits::denorm_min(), Limits::max(), -Limits::infinity(),
                            Limits::quiet_NaN(), std::bit_cast<float>(0xFFC12345)}) {
    const std::string single = Written(&CborWriter::Float, value);
    float read = 1;
    EXPECT_TRUE(CborReader(single).Float(&read));
    EXPECT_EQ(std::bit_cast<uint32_t>(read), std::bit_cast<uint32_t>(value));
    // As doubles they may be other ones, but they are doubles.
    const double wide = std::isnan(value) ? std::bit_cast<double>(0xFFF8123456789ABC) : 1.1 * value;
    const std::string bytes = Written(&CborWriter::Double, wide);
    double read_wide = 1;
    EXPECT_TRUE(CborReader(bytes).Double(&read_wide));
    EXPECT_EQ(std::bit_cast<uint64_t>(read_wide), std::bit_cast<uint64_t>(wide));
    if (std::isnan(value)) continue;
    EXPECT_EQ(json::from_cbor(single).get<float>(), value);
    EXPECT_EQ(json::from_cbor(bytes).get<double>(), wide);
    EXPECT_FALSE(CborReader(bytes).Float(&read)) << "a float was read of a double";
  }
}

TEST(Cbor, StringsArraysAndTheRestAreAsTheStandardHasThem) {
  for (const size_t size : {0U, 1U, 23U, 24U, 255U, 256U, 70000U}) {
    const std::string sent(size, 'x');
    const std::string bytes = Written(&CborWriter::Bytes, sent);
    EXPECT_EQ(bytes, Expected(json::binary({sent.begin(), sent.end()})));
    absl::string_view read;
    EXPECT_TRUE(CborReader(bytes).Bytes(&read));
    EXPECT_EQ(read, sent);

    const std::string nulls(size, '\xF6');
    EXPECT_EQ(Written(&CborWriter::Array, size) + nulls, Expected(json(std::vector<json>(size))));
    uint64_t items = 0;
    const std::string array = Written(&CborWriter::Array, size) + nulls;
    EXPECT_TRUE(CborReader(array).Array(&items));
    EXPECT_EQ(items, size);
  }
  EXPECT_EQ(Written(&CborWriter::Null), Expected(nullptr));
  for (const bool value : {false, true}) {
    const std::string bytes = Written(&CborWriter::Bool, value);
    EXPECT_EQ(bytes, Expected(value));
    bool read = !value;
    EXPECT_TRUE(CborReader(bytes).Bool(&read));
    EXPECT_EQ(read, value);
  }
}

// How often `bytes` begin with an item that a reader takes.
int Taken(absl::string_view bytes) {
  int taken = 0;
  const auto count = [&](auto CborReader::*take, auto... value) {
    CborReader reader(bytes);
    const bool took = (reader.*take)(&value...);
    EXPECT_EQ(took, reader.position() > 0);
    taken += took ? 1 : 0;
  };
  count(&CborReader::Unsigned, uint64_t{});
  count(&CborReader::Signed, int64_t{});
  count(&CborReader::Bool, bool{});
  count(&CborReader::Null);
  count(&CborReader::Float, float{});
  count(&CborReader::Double, double{});
  count(&CborReader::Bytes, absl::string_view());
  count(&CborReader::Array, uint64_t{});
  return taken;
}

TEST(Cbor, WhatNoWriterWritesIsNotTaken) {
  for (const absl::string_view bytes : {
           absl::string_view("\x18\x17"),                                 // 23 in two bytes
           absl::string_view("\x19\x00\xFF", 3),                          // 255 in three
           absl::string_view("\x1A\x00\x00\xFF\xFF", 5),                  // 65535 in five
           absl::string_view("\x1B\x00\x00\x00\x00\xFF\xFF\xFF\xFF", 9),  // 2^32 − 1 in nine
           absl::string_view("\x38\x00", 2),                              // −1 in two
           absl::string_view("\x3B\x80\x00\x00\x00\x00\x00\x00\x00", 9),  // −1 − 2^63
           absl::string_view("\x1C"),
           absl::string_view("\x1F"),  // reserved
           absl::string_view("\x58\x03"
                             "abc"),               // a length in more bytes
           absl::string_view("\x5F\x41\x61\xFF"),  // strings in pieces
           absl::string_view("\x9F\xFF"),          // an array that ends somewhere
           absl::string_view("\x60"),
           absl::string_view("\x61\x61"),  // text
           absl::string_view("\xA0"),
           absl::string_view("\xBF\xFF"),  // maps
           absl::string_view("\xC0\x00", 2),
           absl::string_view("\xD8\x20\x00", 3),  // tags
           absl::string_view("\xE0"),
           absl::string_view("\xF7"),
           absl::string_view("\xF8\xFF"),         // other simple values
           absl::string_view("\xF9\x3C\x00", 3),  // a float of 16 bits
           absl::string_view("\xFF"),
           absl::string_view(""),
       }) {
    EXPECT_EQ(Taken(bytes), 0) << testing::PrintToString(bytes);
  }
}

TEST(Cbor, ALengthOfMoreThanIsThereIsNotTaken) {
  for (const absl::string_view bytes :
       {"\x42x", "\x58\xFFxxx", "\x5B\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFFxxx", "\x82\xF6",
        "\x9A\xFF\xFF\xFF\xFF\xF6", "\x9B\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xF6", "\x18", "\x19\x01",
        "\x1B\x01\x01\x01\x01\x01\x01\x01", "\xFA\x01\x01\x01", "\xFB\x01\x01\x01\x01\x01\x01\x01"}) {
    EXPECT_EQ(Taken(bytes), 0) << testing::PrintToString(bytes);
  }
}

}  // namespace lossd::rpc::cbor_test
