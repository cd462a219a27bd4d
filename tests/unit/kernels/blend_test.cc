// Moving averages on the CPU against their formula in fp64.
#include "kernels/blend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/unit/kernels/optimizer_reference.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::blend_test {
namespace {

using testing::GuardedBytes;
using testing::Narrowed;
using testing::NormalFloats;
using testing::SameBits;

constexpr int64_t kCount = 2311;  // blocks end in the middle
constexpr double kHalfUlp = 1.0 / (1 << 24);
constexpr double kDecays[] = {1e-6, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 0.9999};

double Exact(double decay, double target, double source) { return decay * target + (1 - decay) * source; }

// That of docs/numerics.md: the result's rounding, and three of the smaller part.
double MostError(double decay, double target, double source) {
  const double part = std::min(decay, 1 - decay) * std::abs(source - target);
  return 1.0001 * kHalfUlp * (std::abs(Exact(decay, target, source)) + 3 * part);
}

TEST(Blend, IsAsCloseToFp64AsItSays) {
  const std::vector<float> source = NormalFloats(kCount, 1.0, 1);
  const std::vector<float> before = NormalFloats(kCount, 1.0, 2);
  for (const double decay : kDecays) {
    std::vector<float> target = before;
    CpuBlend({.count = kCount, .weight = target.data()}, {.values = source.data()}, BlendFactorsOf(decay));
    for (size_t i = 0; i < target.size(); ++i) {
      const double error = std::abs(target[i] - Exact(decay, before[i], source[i]));
      ASSERT_LE(error, MostError(decay, before[i], source[i])) << decay << " " << i;
    }
  }
}

// What does not move must not move its average, however often it is taken.
TEST(Blend, EqualWeightsStayAsTheyAre) {
  const std::vector<float> source = NormalFloats(kCount, 1.0, 1);
  for (const double decay : kDecays) {
    std::vector<float> target = source;
    for (int i = 0; i < 10; ++i) {
      CpuBlend({.count = kCount, .weight = target.data()}, {.values = source.data()}, BlendFactorsOf(decay));
    }
    EXPECT_TRUE(SameBits(target, source)) << decay;
  }
}

TEST(Blend, AMasterIsWorkedOnAndTheWeightIsItRounded) {
  const std::vector<float> source = NormalFloats(kCount, 1.0, 1);
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    for (const DataType source_type : {DataType::kFloat32, type}) {
      const std::vector<unsigned char> from = Narrowed(source_type, source);
      std::vector<float> wide_source(kCount);
      Convert(source_type, from.data(), DataType::kFloat32, wide_source.data(), kCount);
      std::vector<float> expected = NormalFloats(kCount, 1.0, 2);
      std::vector<float> master = expected;
      std::vector<unsigned char> weight = Narrowed(type, expected);
      const BlendFactors factors = BlendFactorsOf(0.75);
      CpuBlend({.count = kCount, .weight_type = type, .weight = weight.data(), .master = master.data()},
               {.type = source_type, .values = from.data()}, factors);
      CpuBlend({.count = kCount, .weight = expected.data()}, {.values = wide_source.data()}, factors);
      EXPECT_TRUE(SameBits(master, expected));
      EXPECT_EQ(weight, Narrowed(type, expected));
    }
  }
}

TEST(Blend, WithoutAMasterTheWidenedWeightIsWorkedOnAndRoundedOnce) {
  const std::vector<float> source = NormalFloats(kCount, 1.0, 1);
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    const std::vector<unsigned char> before = Narrowed(type, NormalFloats(kCount, 1.0, 2));
    std::vector<float> expected(kCount);
    Convert(type, before.data(), DataType::kFloat32, expected.data(), kCount);
    GuardedBytes weight(static_cast<int64_t>(before.size()), 64, SizeOf(type));
    std::copy(before.begin(), before.end(), static_cast<unsigned char*>(weight.data()));
    const BlendFactors factors = BlendFactorsOf(0.75);
    CpuBlend({.count = kCount, .weight_type = type, .weight = weight.data()}, {.values = source.data()},
             factors);
    CpuBlend({.count = kCount, .weight = expected.data()}, {.values = source.data()}, factors);
    const auto* const bytes = static_cast<const unsigned char*>(weight.data());
    EXPECT_EQ(std::vector<unsigned char>(bytes, bytes + before.size()), Narrowed(type, expected));
    EXPECT_TRUE(weight.Intact());
  }
}

// Why an average of 16-bit weights has a master.
TEST(Blend, SmallPartsOfASourceAddUpInAMasterAlone) {
  const float one = 1;
  const std::vector<unsigned char> source = Narrowed(DataType::kBFloat16, {1.5f});
  std::vector<unsigned char> rounded = Narrowed(DataType::kBFloat16, {one});
  std::vector<unsigned char> weight = rounded;
  float master = one;
  for (int i = 0; i < 1000; ++i) {
    const BlendFactors factors = BlendFactorsOf(0.999);
    const BlendSource from{.type = DataType::kBFloat16, .values = source.data()};
    CpuBlend({.count = 1, .weight_type = DataType::kBFloat16, .weight = rounded.data()}, from, factors);
    CpuBlend({.count = 1, .weight_type = DataType::kBFloat16, .weight = weight.data(), .master = &master},
             from, factors);
  }
  EXPECT_NEAR(master, 1.5 - 0.5 * std::pow(0.999, 1000), 1e-5);
  EXPECT_EQ(weight, Narrowed(DataType::kBFloat16, {master}));
  EXPECT_EQ(rounded, Narrowed(DataType::kBFloat16, {one}));
}

}  // namespace
}  // namespace lossd::kernels::blend_test
