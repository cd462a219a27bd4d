// Every instruction set this processor can run, against plain loops.
#include "kernels/cpu/simd_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace lossd::kernels::cpu::simd_kernels_test {
namespace {

class SimdKernelsTest : public ::testing::TestWithParam<const SimdKernels*> {};

std::vector<const SimdKernels*> Runnable() {
  std::vector<const SimdKernels*> all;
  for (const SimdKernels* const* k = RunnableSimdKernels(); *k != nullptr; ++k) all.push_back(*k);
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, SimdKernelsTest, ::testing::ValuesIn(Runnable()),
                         [](const auto& test) { return std::string(test.param->name); });

std::vector<float> Random(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> distribution(-1.0f, 1.0f);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(random);
  return values;
}

TEST_P(SimdKernelsTest, TilesFitTheSharedPaddings) {
  EXPECT_EQ(kRowAlignment % GetParam()->tile_rows, 0);
  EXPECT_EQ(kBlock % GetParam()->tile_columns, 0);
  EXPECT_EQ(32 % GetParam()->tile_columns, 0);
}

TEST_P(SimdKernelsTest, BothProductsAgreeWithPlainLoopsAndWithEachOther) {
  const SimdKernels& kernels = *GetParam();
  const int64_t rows = kernels.tile_rows;
  const int64_t columns = kernels.tile_columns;
  for (const int64_t depth : {1, 2, 17, 256}) {
    const std::vector<float> a = Random(rows * depth, 1);  // row-major
    const std::vector<float> b = Random(depth * columns, 2);
    const std::vector<float> before = Random(rows * 40, 3);
    std::vector<float> panel(static_cast<size_t>(rows * depth));
    kernels.pack_transposed(DataType::kFloat32, a.data(), depth, rows, depth, rows, panel.data());
    for (const Store store : {Store::kOverwrite, Store::kAdd}) {
      std::vector<float> c = before;
      std::vector<float> from_rows = before;
      kernels.multiply_panels(depth, panel.data(), b.data(), c.data(), 40, store);
      kernels.multiply_rows(depth, a.data(), depth, b.data(), from_rows.data(), 40, store);
      EXPECT_EQ(c, from_rows);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < 40; ++j) {
          double expected = before[i * 40 + j];
          if (j < columns) {
            if (store == Store::kOverwrite) expected = 0;
            for (int64_t k = 0; k < depth; ++k) {
              expected += static_cast<double>(a[i * depth + k]) * b[k * columns + j];
            }
          }
          EXPECT_NEAR(c[i * 40 + j], expected, 1e-6 * static_cast<double>(depth));
        }
      }
    }
  }
}

TEST_P(SimdKernelsTest, AnElementsBitsDoNotDependOnItsPlaceInTheTile) {
  const SimdKernels& kernels = *GetParam();
  const int64_t depth = 200;
  // Equal rows and equal columns: every element is the same product.
  const std::vector<float> x = Random(depth, 4);
  const std::vector<float> w = Random(depth, 5);
  std::vector<float> a(static_cast<size_t>(depth * kernels.tile_rows));
  std::vector<float> b(static_cast<size_t>(depth * kernels.tile_columns));
  for (int64_t k = 0; k < depth; ++k) {
    std::fill_n(a.begin() + k * kernels.tile_rows, kernels.tile_rows, x[k]);
    std::fill_n(b.begin() + k * kernels.tile_columns, kernels.tile_columns, w[k]);
  }
  std::vector<float> c(static_cast<size_t>(kernels.tile_rows * kernels.tile_columns));
  kernels.multiply_panels(depth, a.data(), b.data(), c.data(), kernels.tile_columns, Store::kOverwrite);
  for (const float value : c) EXPECT_EQ(value, c[0]);
}

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};

void ExpectPackedRaggedWithZeros(const SimdKernels& kernels, DataType type) {
  const int64_t stride = 50;
  const std::vector<float> exact = Random(60 * stride, 6);
  std::vector<uint32_t> stored(exact.size());  // room for either size of element
  std::vector<float> rounded(exact.size());
  Convert(DataType::kFloat32, exact.data(), type, stored.data(), 60 * stride);
  Convert(type, stored.data(), DataType::kFloat32, rounded.data(), 60 * stride);
  for (const int64_t width : {kernels.tile_rows, kernels.tile_columns}) {
    for (int64_t columns = 0; columns <= width; ++columns) {
      for (const int64_t depth : {1, 7, 8, 37, 50}) {
        const float nan = std::numeric_limits<float>::quiet_NaN();
        std::vector<float> transposed(static_cast<size_t>(width * depth + 1), nan);
        std::vector<float> plain(static_cast<size_t>(width * depth + 1), nan);
        kernels.pack_transposed(type, stored.data(), stride, columns, depth, width, transposed.data());
        kernels.pack(type, stored.data(), stride, depth, columns, width, plain.data());
        for (int64_t k = 0; k < depth; ++k) {
          for (int64_t i = 0; i < width; ++i) {
            ASSERT_EQ(transposed[k * width + i], i < columns ? rounded[i * stride + k] : 0.0f);
            ASSERT_EQ(plain[k * width + i], i < columns ? rounded[k * stride + i] : 0.0f);
          }
        }
        EXPECT_TRUE(std::isnan(transposed.back()));
        EXPECT_TRUE(std::isnan(plain.back()));
      }
    }
  }
}

TEST_P(SimdKernelsTest, PacksRaggedMatricesOfEveryTypeWithZeros) {
  for (const DataType type : kTypes) {
    SCOPED_TRACE(Name(type));
    ExpectPackedRaggedWithZeros(*GetParam(), type);
  }
}

// Through whole vectors and, in a panel of one column, through single elements.
TEST_P(SimdKernelsTest, PackingWidensEvery16BitValueExactly) {
  const SimdKernels& kernels = *GetParam();
  const int64_t width = kernels.tile_columns;
  std::vector<uint16_t> all(65536);
  std::iota(all.begin(), all.end(), uint16_t{0});
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    SCOPED_TRACE(Name(type));
    std::vector<float> expected(all.size());
    Convert(type, all.data(), DataType::kFloat32, expected.data(), 65536);
    for (const int64_t columns : {width, int64_t{1}}) {
      const int64_t depth = 65536 / columns;
      std::vector<float> panel(static_cast<size_t>(width * depth));
      kernels.pack(type, all.data(), columns, depth, columns, width, panel.data());
      for (int64_t i = 0; i < depth * columns; ++i) {
        const float packed = panel[i / columns * width + i % columns];
        if (std::isnan(expected[i])) {
          ASSERT_TRUE(std::isnan(packed)) << i;
        } else {
          ASSERT_EQ(std::bit_cast<uint32_t>(packed), std::bit_cast<uint32_t>(expected[i])) << i;
        }
      }
    }
  }
}

TEST_P(SimdKernelsTest, ExpIsWithinTwoUlpOverTheWholeRange) {
  const SimdKernels& kernels = *GetParam();
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    const float z = -80.0f + 160.0f * static_cast<float>(i) / 200000.0f;
    float e = z;
    kernels.exp_row(&e, 1, 0.0f, 0);
    if (z * 1.4427 < -109) continue;
    worst = std::fmax(worst, std::fabs(e / std::exp(static_cast<double>(z)) - 1));
  }
  EXPECT_LT(worst, 2 * 0x1p-23);
}

TEST_P(SimdKernelsTest, TheIntegerExponentNeverTouchesTheMantissa) {
  const SimdKernels& kernels = *GetParam();
  for (const float z : {0.3f, 37.77f, -12.1f, 1000.5f, -1000.5f, 9999.9f}) {
    const int32_t near = static_cast<int32_t>(std::lrint(z * 1.4427));
    float at_zero = z;
    kernels.exp_row(&at_zero, 1, 0.0f, near);
    for (const int32_t shift : {-90, -1, 1, 40, 90}) {
      float e = z;
      kernels.exp_row(&e, 1, 0.0f, near + shift);
      EXPECT_EQ(e, std::ldexp(at_zero, -shift)) << z << " " << shift;
    }
  }
}

TEST_P(SimdKernelsTest, ExpOfLargeLogitsIsAccurateRelativeToTheOffset) {
  const SimdKernels& kernels = *GetParam();
  for (const float z : {9999.0f, -9999.0f, 9990.5f, 123.456f}) {
    const double exponent = std::floor(z / M_LN2);
    float e = z;
    kernels.exp_row(&e, 1, 0.0f, static_cast<int32_t>(exponent));
    const long double expected = expl(static_cast<long double>(z) - exponent * M_LN2l);
    EXPECT_NEAR(static_cast<double>(e / expected), 1.0, 4e-7) << z;
  }
}

TEST_P(SimdKernelsTest, ExpFlagsWhatIsOutOfRangeAndFlushesWhatIsTiny) {
  const SimdKernels& kernels = *GetParam();
  const auto exp = [&](float z) {
    kernels.exp_row(&z, 1, 0.0f, 0);
    return z;
  };
  for (const float z : {89.0f, 1e4f, 1e9f, 3e38f, HUGE_VALF, std::nanf("")}) {
    EXPECT_EQ(exp(z), HUGE_VALF) << z;
  }
  for (const float z : {-77.0f, -1e4f, -1e9f, -3e38f, -HUGE_VALF}) EXPECT_EQ(exp(z), 0.0f) << z;
}

TEST_P(SimdKernelsTest, RowsOfAnyLengthGiveTheSameBitsAndTheirSum) {
  const SimdKernels& kernels = *GetParam();
  const std::vector<float> z = Random(100, 7);
  std::vector<float> whole = z;
  kernels.exp_row(whole.data(), 100, 0.25f, 3);
  for (int64_t count = 1; count <= 100; ++count) {
    std::vector<float> part = z;
    const double sum = kernels.exp_row(part.data(), count, 0.25f, 3);
    double expected = 0;
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(part[i], whole[i]);
      expected += part[i];
    }
    for (int64_t i = count; i < 100; ++i) ASSERT_EQ(part[i], z[i]);
    EXPECT_NEAR(sum, expected, 1e-12 * expected);
    EXPECT_EQ(kernels.max_row(z.data(), count), *std::max_element(z.begin(), z.begin() + count));
  }
}

TEST_P(SimdKernelsTest, MaximumIsNaNIfAnyValueIs) {
  for (int64_t at = 0; at < 40; ++at) {
    std::vector<float> values(40, 1.0f);
    values[at] = std::nanf("");
    EXPECT_TRUE(std::isnan(GetParam()->max_row(values.data(), 40))) << at;
  }
}

TEST_P(SimdKernelsTest, CapIsWithinFourUlpAndSoIsItsDerivative) {
  const SimdKernels& kernels = *GetParam();
  for (const float cap : {1.0f, 30.0f, 0.37f}) {
    double worst = 0;
    double worst_factor = 0;
    for (int i = -100000; i <= 100000; ++i) {
      const float z = static_cast<float>(i) * 0.0004f * cap;
      float value = z;
      float factor = 0;
      kernels.cap_row(&value, &factor, 1, cap);
      const double t = static_cast<double>(z) / cap;
      if (z == 0) {
        EXPECT_EQ(value, 0.0f);
        continue;
      }
      worst = std::fmax(worst, std::fabs(value / (cap * std::tanh(t)) - 1));
      if (std::fabs(t) > 37) continue;  // below the range of e^z
      // t is rounded, and the derivative passes that on: e^-2|t| times as much.
      const double allowed = 1 + 2 * std::fabs(t);
      worst_factor = std::fmax(worst_factor, std::fabs(factor * std::cosh(t) * std::cosh(t) - 1) / allowed);
      EXPECT_LE(std::fabs(value), cap);
    }
    EXPECT_LT(worst, 4 * 0x1p-23) << cap;
    EXPECT_LT(worst_factor, 4 * 0x1p-23) << cap;
  }
}

TEST_P(SimdKernelsTest, CapOfExtremesSaturatesAndOfWhatIsNotFiniteIsNaN) {
  const auto capped = [](float z, float cap, float* factor) {
    GetParam()->cap_row(&z, factor, 1, cap);
    return z;
  };
  float factor = 0;
  for (const float cap : {1e-30f, 1.0f, 1e30f}) {
    EXPECT_EQ(capped(3e38f, cap, &factor), cap);
    EXPECT_EQ(factor, 0.0f);
    EXPECT_EQ(capped(-3e38f, cap, &factor), -cap);
    EXPECT_TRUE(std::isnan(capped(HUGE_VALF, cap, &factor)));
    EXPECT_EQ(capped(-HUGE_VALF, cap, &factor), -cap);
    EXPECT_EQ(factor, 0.0f);
    EXPECT_TRUE(std::isnan(capped(std::nanf(""), cap, &factor)));
  }
  // Far below the cap nothing happens, even where z / cap is below the range.
  EXPECT_EQ(capped(1.5f, 3e38f, &factor), 1.5f);
  EXPECT_EQ(factor, 1.0f);
}

// Lengths that end inside a vector: the same bits, nothing written beyond, and sums of just these.
TEST_P(SimdKernelsTest, RowLoopsAgreeWithPlainOnesAtAnyLength) {
  const SimdKernels& kernels = *GetParam();
  const std::vector<float> z = Random(100, 8);
  const std::vector<float> weights = Random(100, 9);
  const std::vector<float> factors = Random(100, 10);
  std::vector<float> whole = z;
  std::vector<float> slopes(100);
  kernels.cap_row(whole.data(), slopes.data(), 100, 0.8f);
  for (int64_t count = 1; count <= 100; ++count) {
    std::vector<float> part = z;
    std::vector<float> part_slopes(100, 7.0f);
    kernels.cap_row(part.data(), part_slopes.data(), count, 0.8f);
    std::vector<float> gradient = z;
    kernels.gradient_row(gradient.data(), weights.data(), factors.data(), count, 0.3f, 0.7f);
    std::vector<float> plain_gradient = z;
    kernels.gradient_row(plain_gradient.data(), nullptr, nullptr, count, 0.3f, 0.7f);
    double sum = 0;
    double product = 0;
    double moment = 0;
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(part[i], whole[i]);
      ASSERT_EQ(part_slopes[i], slopes[i]);
      ASSERT_NEAR(gradient[i], (0.3 * z[i] - 0.7 * weights[i]) * factors[i], 3e-7);
      ASSERT_NEAR(plain_gradient[i], 0.3 * z[i] - 0.7, 3e-7);
      sum += z[i];
      product += static_cast<double>(z[i]) * weights[i];
      if (weights[i] > 0) moment += static_cast<double>(weights[i]) * (z[i] - 1.5f);
    }
    for (int64_t i = count; i < 100; ++i) {
      ASSERT_EQ(part[i], z[i]);
      ASSERT_EQ(part_slopes[i], 7.0f);
      ASSERT_EQ(gradient[i], z[i]);
    }
    EXPECT_NEAR(kernels.sum_row(z.data(), nullptr, count), sum, 1e-12);
    EXPECT_NEAR(kernels.sum_row(z.data(), weights.data(), count), product, 1e-12);
    std::vector<float> exponentials = weights;
    std::vector<float> logits = z;
    for (int64_t i = 0; i < count; ++i) {
      if (weights[i] > 0) continue;
      exponentials[i] = 0.0f;
      logits[i] = -HUGE_VALF;
    }
    EXPECT_NEAR(kernels.moment_row(exponentials.data(), logits.data(), count, 1.5f), moment, 1e-12);
    std::vector<float> spread = exponentials;
    kernels.spread_row(spread.data(), logits.data(), count,
                       {.slope = 0.3f, .spread = 0.7f, .largest = 1.5f, .mean = -0.25f});
    for (int64_t i = 0; i < 100; ++i) {
      const double factor = i < count ? 0.3 - 0.7 * (static_cast<double>(logits[i]) - 1.25) : 1.0;
      ASSERT_NEAR(spread[i], exponentials[i] > 0 || i >= count ? exponentials[i] * factor : 0.0, 1e-6) << i;
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::cpu::simd_kernels_test
