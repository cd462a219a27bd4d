#include "kernels/data_type.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace lossd::kernels::data_type_test {
namespace {

struct Format {
  DataType type;
  int exponent_bits;
  int mantissa_bits;
};
constexpr Format kFormats[] = {{DataType::kBFloat16, 8, 7}, {DataType::kFloat16, 5, 10}};

// The value of a pattern by the definition of the format.
double Decode(const Format& format, uint32_t bits) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << format.mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> format.mantissa_bits) & ((1u << format.exponent_bits) - 1));
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << format.exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  const int scale = (exponent == 0 ? 1 : exponent) - bias - format.mantissa_bits;
  return sign *
         std::ldexp((exponent == 0 ? 0 : 1 << format.mantissa_bits) + static_cast<int>(mantissa), scale);
}

float Widen(DataType type, uint16_t bits) {
  float value = 0;
  Convert(type, &bits, DataType::kFloat32, &value, 1);
  return value;
}

uint16_t Narrow(DataType type, float value) {
  uint16_t bits = 0;
  Convert(DataType::kFloat32, &value, type, &bits, 1);
  return bits;
}

TEST(Convert, WidensEveryPatternExactlyAndNarrowsItBack) {
  for (const Format& format : kFormats) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const double expected = Decode(format, bits);
      const float wide = Widen(format.type, static_cast<uint16_t>(bits));
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(wide)) << bits;
        EXPECT_TRUE(std::isnan(Widen(format.type, Narrow(format.type, wide)))) << bits;
        continue;
      }
      EXPECT_EQ(wide, expected) << bits;
      EXPECT_EQ(std::signbit(wide), (bits & 0x8000u) != 0) << bits;
      EXPECT_EQ(Narrow(format.type, wide), bits);
    }
  }
}

TEST(Convert, RoundsTiesToEvenBetweenEveryPairOfNeighbours) {
  for (const Format& format : kFormats) {
    const uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
    for (uint32_t bits = 0; bits < infinity; ++bits) {
      // The value above the largest finite one is where it would be if the format went on.
      const double low = Decode(format, bits);
      const double high = bits + 1 < infinity ? Decode(format, bits + 1) : 2 * low - Decode(format, bits - 1);
      const auto middle = static_cast<float>(low + (high - low) / 2);
      ASSERT_EQ(middle, low + (high - low) / 2);
      const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
      for (const uint32_t sign : {0u, 0x8000u}) {
        const float s = sign != 0 ? -1.0f : 1.0f;
        EXPECT_EQ(Narrow(format.type, s * middle), sign | even) << bits;
        EXPECT_EQ(Narrow(format.type, s * std::nextafter(middle, 0.0f)), sign | bits) << bits;
        EXPECT_EQ(Narrow(format.type, s * std::nextafter(middle, HUGE_VALF)), sign | (bits + 1)) << bits;
      }
    }
  }
}

TEST(Convert, KeepsNaNAndInfinityAndSaturatesBeyondTheRange) {
  const float inf = HUGE_VALF;
  EXPECT_EQ(Narrow(DataType::kBFloat16, inf), 0x7f80);
  EXPECT_EQ(Narrow(DataType::kBFloat16, -inf), 0xff80);
  EXPECT_EQ(Narrow(DataType::kFloat16, inf), 0x7c00);
  EXPECT_EQ(Narrow(DataType::kFloat16, -1e30f), 0xfc00);
  EXPECT_EQ(Narrow(DataType::kFloat16, 1e-30f), 0x0000);
  // NaNs whose payload lies only in the bits that are cut off, and one that rounding would carry out of the
  // exponent.
  for (const uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu, 0x7fc00000u}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(Widen(DataType::kBFloat16, Narrow(DataType::kBFloat16, nan)))) << bits;
    EXPECT_TRUE(std::isnan(Widen(DataType::kFloat16, Narrow(DataType::kFloat16, nan)))) << bits;
  }
}

TEST(Convert, BetweenNarrowTypesRoundsOnce) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    uint16_t brain = 0;
    Convert(DataType::kFloat16, &half, DataType::kBFloat16, &brain, 1);
    EXPECT_EQ(brain, Narrow(DataType::kBFloat16, Widen(DataType::kFloat16, half)));
    uint16_t back = 0;
    Convert(DataType::kBFloat16, &half, DataType::kFloat16, &back, 1);
    EXPECT_EQ(back, Narrow(DataType::kFloat16, Widen(DataType::kBFloat16, half)));
  }
}

TEST(Convert, WorksAtAnyAddressAndInPlaceForTheSameType) {
  std::vector<float> values(37);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.37f * static_cast<float>(i) - 5.0f;
  std::vector<unsigned char> narrow(values.size() * 2 + 1);
  std::vector<unsigned char> wide(values.size() * 4 + 3);
  Convert(DataType::kFloat32, values.data(), DataType::kBFloat16, narrow.data() + 1, 37);
  Convert(DataType::kBFloat16, narrow.data() + 1, DataType::kFloat32, wide.data() + 3, 37);
  for (size_t i = 0; i < values.size(); ++i) {
    float value = 0;
    std::memcpy(&value, wide.data() + 3 + 4 * i, 4);
    EXPECT_EQ(value, Widen(DataType::kBFloat16, Narrow(DataType::kBFloat16, values[i])));
  }
  const std::vector<float> before = values;
  Convert(DataType::kFloat32, values.data(), DataType::kFloat32, values.data(), 37);
  EXPECT_EQ(values, before);
  Convert(DataType::kFloat32, nullptr, DataType::kFloat32, nullptr, 0);
}

TEST(CountNonFinite, CountsNaNAndInfinityOfEveryType) {
  for (const Format& format : kFormats) {
    std::vector<uint16_t> all(65536);
    int64_t expected = 0;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      all[bits] = static_cast<uint16_t>(bits);
      expected += !std::isfinite(Decode(format, bits));
    }
    EXPECT_EQ(CountNonFinite(format.type, all.data(), 65536), expected);
  }
  const float values[] = {0.0f, -HUGE_VALF, 3e38f, std::nanf(""), 1e-45f, HUGE_VALF};
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, values, 6), 3);
  EXPECT_EQ(CountNonFinite(DataType::kFloat32, values, 0), 0);
}

TEST(DataType, KnowsItsSizeAndName) {
  EXPECT_EQ(SizeOf(DataType::kFloat32), 4);
  EXPECT_EQ(SizeOf(DataType::kBFloat16), 2);
  EXPECT_EQ(SizeOf(DataType::kFloat16), 2);
  EXPECT_STREQ(Name(DataType::kBFloat16), "bfloat16");
}

}  // namespace
}  // namespace lossd::kernels::data_type_test
