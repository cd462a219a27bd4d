// Conversions between element types.
#include "client/src/common/data_type.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace lossd::internal::data_type_test {
namespace {

float Widen(DataType type, uint16_t bits) {
  float value = 0;
  ConvertElements(type, &bits, DataType::kFloat32, &value, 1);
  return value;
}

uint16_t Narrow(DataType type, float value) {
  uint16_t bits = 0;
  ConvertElements(DataType::kFloat32, &value, type, &bits, 1);
  return bits;
}

// The value of a 16-bit float from its definition.
double Define(DataType type, uint16_t bits) {
  const int mantissa_bits = type == DataType::kBFloat16 ? 7 : 10;
  const int bias = type == DataType::kBFloat16 ? 127 : 15;
  const int most_exponent = (1 << (15 - mantissa_bits)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == most_exponent) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

class NarrowTypeTest : public ::testing::TestWithParam<DataType> {};

TEST_P(NarrowTypeTest, EveryValueWidensExactlyAndComesBack) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const double expected = Define(GetParam(), half);
    const float wide = Widen(GetParam(), half);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(wide)) << bits;
      EXPECT_TRUE(std::isnan(Widen(GetParam(), Narrow(GetParam(), wide)))) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(wide), expected) << bits;
      ASSERT_EQ(std::signbit(wide), std::signbit(expected)) << bits;
      ASSERT_EQ(Narrow(GetParam(), wide), half) << bits;
    }
  }
}

TEST_P(NarrowTypeTest, RoundsToNearestEven) {
  // Between every two neighbours: the middle goes to the even one, anything else to the nearer one.
  const uint32_t infinity = GetParam() == DataType::kBFloat16 ? 0x7f80 : 0x7c00;
  for (uint32_t bits = 0; bits + 1 < infinity; ++bits) {
    const float low = Widen(GetParam(), static_cast<uint16_t>(bits));
    const float high = Widen(GetParam(), static_cast<uint16_t>(bits + 1));
    const auto middle = static_cast<float>((static_cast<double>(low) + high) / 2);
    if (static_cast<double>(middle) * 2 != static_cast<double>(low) + high) continue;  // below fp32 itself
    const auto even = static_cast<uint16_t>((bits & 1) == 0 ? bits : bits + 1);
    ASSERT_EQ(Narrow(GetParam(), middle), even) << bits;
    ASSERT_EQ(Narrow(GetParam(), -middle), even | 0x8000) << bits;
    ASSERT_EQ(Narrow(GetParam(), std::nextafterf(middle, low)), bits) << bits;
    ASSERT_EQ(Narrow(GetParam(), std::nextafterf(middle, high)), bits + 1) << bits;
  }
}

TEST_P(NarrowTypeTest, TooLargeBecomesInfinityAndTinyBecomesZero) {
  const uint16_t infinity = GetParam() == DataType::kBFloat16 ? 0x7f80 : 0x7c00;
  EXPECT_EQ(Narrow(GetParam(), std::numeric_limits<float>::max()), infinity);
  EXPECT_EQ(Narrow(GetParam(), -std::numeric_limits<float>::infinity()), infinity | 0x8000);
  EXPECT_EQ(Narrow(GetParam(), -std::numeric_limits<float>::denorm_min()), 0x8000);
}

TEST_P(NarrowTypeTest, NanWithALowPayloadStaysNan) {
  EXPECT_TRUE(std::isnan(Widen(GetParam(), Narrow(GetParam(), std::bit_cast<float>(0x7f800001U)))));
  EXPECT_TRUE(std::isnan(Widen(GetParam(), Narrow(GetParam(), std::bit_cast<float>(0xffffffffU)))));
}

INSTANTIATE_TEST_SUITE_P(Narrow, NarrowTypeTest, ::testing::Values(DataType::kBFloat16, DataType::kFloat16),
                         [](const auto& parameter) { return Name(parameter.param); });

TEST(ConvertElementsTest, LongUnalignedRunsBetweenNarrowTypes) {
  constexpr int64_t kCount = 5000;  // several blocks and a rest
  std::mt19937 random(7);
  std::vector<char> from(2 * kCount + 1);
  std::vector<char> to(2 * kCount + 1);
  std::vector<uint16_t> halves;
  for (int64_t i = 0; i < kCount; ++i) {
    halves.push_back(Narrow(DataType::kFloat16, static_cast<float>(random() % 2001) - 1000.0F));
  }
  std::copy_n(reinterpret_cast<const char*>(halves.data()), 2 * kCount, from.data() + 1);
  ConvertElements(DataType::kFloat16, from.data() + 1, DataType::kBFloat16, to.data() + 1, kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    uint16_t result = 0;
    std::copy_n(to.data() + 1 + 2 * i, 2, reinterpret_cast<char*>(&result));
    ASSERT_EQ(result, Narrow(DataType::kBFloat16, Widen(DataType::kFloat16, halves[static_cast<size_t>(i)])));
  }
  ConvertElements(DataType::kFloat32, nullptr, DataType::kFloat16, nullptr, 0);
}

}  // namespace
}  // namespace lossd::internal::data_type_test
