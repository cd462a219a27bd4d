// The one source of every SimdKernels table: included by simd_kernels_<isa>.cc, which is compiled for that
// instruction set and instantiates it for the vector width.
//
// Everything is in an anonymous namespace and nothing from the standard library is called: a function shared
// with other translation units could be kept by the linker in the version of the widest instruction set and
// then crash on an older processor.
#ifndef LOSSD_KERNELS_CPU_SIMD_KERNELS_INL_H_
#define LOSSD_KERNELS_CPU_SIMD_KERNELS_INL_H_

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/cpu/simd_kernels.h"

namespace lossd::kernels::cpu {
// One copy for each file that includes it is what is wanted.
// NOLINTNEXTLINE(google-build-namespaces)
namespace {

template <int kLanes>
struct Vectors {
  using Float [[gnu::vector_size(kLanes * 4)]] = float;
  using HalfFloat [[gnu::vector_size(kLanes * 2)]] = float;
  using Int [[gnu::vector_size(kLanes * 4)]] = int32_t;
  using Short [[gnu::vector_size(kLanes * 2)]] = uint16_t;
  using Double [[gnu::vector_size(kLanes * 4)]] = double;  // half as many lanes
};

template <typename Vector>
inline Vector LoadVector(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename Vector>
inline void StoreVector(void* to, Vector value) {
  std::memcpy(to, &value, sizeof(value));
}

// The 16-bit types as they lie in memory.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <int kLanes, int kRows>
struct SimdImplementation {
  using Float = typename Vectors<kLanes>::Float;
  using HalfFloat = typename Vectors<kLanes>::HalfFloat;
  using Int = typename Vectors<kLanes>::Int;
  using Short = typename Vectors<kLanes>::Short;
  using Double = typename Vectors<kLanes>::Double;
  using Lanes = std::make_index_sequence<kLanes>;
  using HalfLanes = std::make_index_sequence<kLanes / 2>;
  static constexpr int kColumns = 2 * kLanes;

  // One register tile. The left operand's element (row i, step k) is a[i * row_stride + k * step_stride].
  static inline __attribute__((always_inline)) void Multiply(int64_t depth, const float* a,
                                                             int64_t row_stride, int64_t step_stride,
                                                             const float* b, float* c, int64_t c_stride,
                                                             Store store) {
    Float sum[kRows][2];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      sum[i][0] = Float{};
      sum[i][1] = Float{};
      __builtin_prefetch(c + i * c_stride, 1);
      __builtin_prefetch(c + i * c_stride + kColumns - 1, 1);
    }
    // The compiler leaves this loop rolled by itself; unrolled, the fp32 step is 5 % faster on AVX-512.
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; ++k) {
      const Float b0 = LoadVector<Float>(b + k * kColumns);
      const Float b1 = LoadVector<Float>(b + k * kColumns + kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const float left = a[i * row_stride + k * step_stride];
        sum[i][0] += left * b0;
        sum[i][1] += left * b1;
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      float* row = c + i * c_stride;
      if (store == Store::kAdd) {
        sum[i][0] = LoadVector<Float>(row) + sum[i][0];
        sum[i][1] = LoadVector<Float>(row + kLanes) + sum[i][1];
      }
      StoreVector(row, sum[i][0]);
      StoreVector(row + kLanes, sum[i][1]);
    }
  }

  static void MultiplyPanels(int64_t depth, const float* a, const float* b, float* c, int64_t c_stride,
                             Store store) {
    Multiply(depth, a, 1, kRows, b, c, c_stride, store);
  }

  static void MultiplyRows(int64_t depth, const float* a, int64_t a_stride, const float* b, float* c,
                           int64_t c_stride, Store store) {
    Multiply(depth, a, a_stride, 1, b, c, c_stride, store);
  }

  static Float ToFloat(Int value) { return __builtin_convertvector(value, Float); }
  static float ToFloat(int32_t value) { return static_cast<float>(value); }

  template <typename To, typename From>
  static To Reinterpret(From from) {
    To to;
    static_assert(sizeof(to) == sizeof(from));
    std::memcpy(&to, &from, sizeof(to));
    return to;
  }

  // The value of an element's bits, or of a vector of them: exact, infinities stay infinite and NaN stays
  // NaN.
  template <typename Element, typename WideFloat, typename WideInt>
  static inline __attribute__((always_inline)) WideFloat WidenBits(WideInt bits) {
    if constexpr (std::is_same_v<Element, BFloat16>) return Reinterpret<WideFloat>(bits << 16);
    // fp16 by integers: not every instruction set converts it.
    const WideInt magnitude = bits & 0x7fff;
    const WideInt sign = (bits & 0x8000) << 16;
    const WideFloat small = ToFloat(magnitude) * 0x1p-24f;  // denormals count units of 2^-24
    const WideInt normal = (magnitude << 13) + ((127 - 15) << 23);
    const WideInt special = (magnitude << 13) | 0x7f800000;
    const WideInt finite = magnitude < 0x0400 ? Reinterpret<WideInt>(small) : normal;
    return Reinterpret<WideFloat>((magnitude >= 0x7c00 ? special : finite) | sign);
  }

  // kLanes elements from memory, widened; and one.
  static Float LoadWide(const float* from) { return LoadVector<Float>(from); }
  template <typename Element>
  static Float LoadWide(const Element* from) {
    return WidenBits<Element, Float>(__builtin_convertvector(LoadVector<Short>(from), Int));
  }
  template <typename Element>
  static float Widen(const Element* from) {
    Element element;
    std::memcpy(&element, from, sizeof(element));
    if constexpr (std::is_same_v<Element, float>) {
      return element;
    } else {
      return WidenBits<Element, float>(static_cast<int32_t>(element.bits));
    }
  }

  // One step of a transposition: exchanges the off-diagonal blocks of kDistance x kDistance lanes between two
  // rows.
  template <int kDistance, size_t... kLane>
  static void Exchange(Float& a, Float& b, std::index_sequence<kLane...>) {
    const Float low =
        __builtin_shufflevector(a, b,
                                ((kLane & kDistance) == 0 ? static_cast<int>(kLane)
                                                          : static_cast<int>(kLane) - kDistance + kLanes)...);
    b = __builtin_shufflevector(a, b,
                                ((kLane & kDistance) == 0 ? static_cast<int>(kLane) + kDistance
                                                          : static_cast<int>(kLane) + kLanes)...);
    a = low;
  }

  template <int kDistance>
  static inline __attribute__((always_inline)) void Transpose(Float (&rows)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kDistance) == 0) Exchange<kDistance>(rows[i], rows[i + kDistance], Lanes());
    }
    if constexpr (kDistance > 1) Transpose<kDistance / 2>(rows);
  }

  template <typename Element>
  static void PackTransposedAs(const Element* from, int64_t stride, int64_t columns, int64_t depth,
                               int64_t width, float* panel) {
    int64_t k = 0;
    if (columns == width && width == kColumns) {
      for (; k + kLanes <= depth; k += kLanes) {
        for (int64_t first = 0; first < kColumns; first += kLanes) {
          Float rows[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) rows[i] = LoadWide(from + (first + i) * stride + k);
          Transpose<kLanes / 2>(rows);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) StoreVector(panel + (k + i) * kColumns + first, rows[i]);
        }
      }
    }
    for (; k < depth; ++k) {
      for (int64_t i = 0; i < columns; ++i) {
        panel[k * width + i] = Widen(from + i * stride + k);
      }
      for (int64_t i = columns; i < width; ++i) panel[k * width + i] = 0.0f;
    }
  }

  static void PackTransposed(DataType type, const void* from, int64_t stride, int64_t columns, int64_t depth,
                             int64_t width, float* panel) {
    switch (type) {
      case DataType::kFloat32:
        return PackTransposedAs(static_cast<const float*>(from), stride, columns, depth, width, panel);
      case DataType::kBFloat16:
        return PackTransposedAs(static_cast<const BFloat16*>(from), stride, columns, depth, width, panel);
      case DataType::kFloat16:
        return PackTransposedAs(static_cast<const Float16*>(from), stride, columns, depth, width, panel);
    }
  }

  template <typename Element>
  static void PackAs(const Element* from, int64_t stride, int64_t depth, int64_t columns, int64_t width,
                     float* panel) {
    if (columns == width && width == kColumns) {
      for (int64_t k = 0; k < depth; ++k) {
        StoreVector(panel + k * kColumns, LoadWide(from + k * stride));
        StoreVector(panel + k * kColumns + kLanes, LoadWide(from + k * stride + kLanes));
      }
      return;
    }
    if constexpr (sizeof(Element) == sizeof(float)) {
      if (columns == width && width == kRows) {
        for (int64_t k = 0; k < depth; ++k) {
          std::memcpy(panel + k * kRows, from + k * stride, kRows * sizeof(float));
        }
        return;
      }
    }
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t i = 0; i < columns; ++i) {
        panel[k * width + i] = Widen(from + k * stride + i);
      }
      for (int64_t i = columns; i < width; ++i) panel[k * width + i] = 0.0f;
    }
  }

  static void Pack(DataType type, const void* from, int64_t stride, int64_t depth, int64_t columns,
                   int64_t width, float* panel) {
    switch (type) {
      case DataType::kFloat32:
        return PackAs(static_cast<const float*>(from), stride, depth, columns, width, panel);
      case DataType::kBFloat16:
        return PackAs(static_cast<const BFloat16*>(from), stride, depth, columns, width, panel);
      case DataType::kFloat16:
        return PackAs(static_cast<const Float16*>(from), stride, depth, columns, width, panel);
    }
  }

  static inline __attribute__((always_inline)) Float Exp(Float z, float offset, int32_t exponent) {
    // Comparisons are false for NaN, which therefore becomes kHighest and ends as infinity.
    constexpr float kHighest = 0x1p25f;
    Float d = z - offset;
    d = d < kHighest ? d : Float{} + kHighest;
    d = d > -kHighest ? d : Float{} - kHighest;
    // d = n ln 2 + r with |r| <= ln(2)/2; ln 2 in two parts, of which the first has few enough bits that n
    // times it is exact.
    const Float t = d * 1.44269504088896341f;
    const Int n = __builtin_convertvector(t + (t > 0.0f ? Float{} + 0.5f : Float{} - 0.5f), Int);
    const Float whole = __builtin_convertvector(n, Float);
    Float r = d - whole * 0.693359375f;
    r = r + whole * 2.12194440054690583e-4f;
    // Taylor's series: the first term left out is below 2^-27 on the interval.
    Float p = Float{} + 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // The integers meet before they touch a mantissa.
    Int power = n - exponent;
    power = power < 128 ? power : Int{} + 128;
    power = power >= -110 ? power : Int{} - 127;  // exponent field 0: scales to zero
    const Int bits = (power + 127) << 23;
    Float scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
  }

  // Sums in double, lane by lane.
  struct Sum {
    Double low{};
    Double high{};

    template <size_t... kLane>
    inline __attribute__((always_inline)) void Add(Float value, std::index_sequence<kLane...>) {
      const HalfFloat low_half = __builtin_shufflevector(value, value, static_cast<int>(kLane)...);
      const HalfFloat high_half =
          __builtin_shufflevector(value, value, static_cast<int>(kLane + kLanes / 2)...);
      low += __builtin_convertvector(low_half, Double);
      high += __builtin_convertvector(high_half, Double);
    }
    template <size_t... kLane>
    inline __attribute__((always_inline)) void AddProduct(Float a, Float b, std::index_sequence<kLane...>) {
      const HalfFloat a_low = __builtin_shufflevector(a, a, static_cast<int>(kLane)...);
      const HalfFloat b_low = __builtin_shufflevector(b, b, static_cast<int>(kLane)...);
      const HalfFloat a_high = __builtin_shufflevector(a, a, static_cast<int>(kLane + kLanes / 2)...);
      const HalfFloat b_high = __builtin_shufflevector(b, b, static_cast<int>(kLane + kLanes / 2)...);
      low += __builtin_convertvector(a_low, Double) * __builtin_convertvector(b_low, Double);
      high += __builtin_convertvector(a_high, Double) * __builtin_convertvector(b_high, Double);
    }
    double Total() const {
      const Double both = low + high;
      double total = 0;
      for (int lane = 0; lane < kLanes / 2; ++lane) total += both[lane];
      return total;
    }
  };

  static double ExpRow(float* values, int64_t count, float offset, int32_t exponent) {
    Sum sum;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Float e = Exp(LoadVector<Float>(values + i), offset, exponent);
      StoreVector(values + i, e);
      sum.Add(e, HalfLanes());
    }
    if (i < count) {
      const auto rest_bytes = static_cast<size_t>(count - i) * sizeof(float);
      Float rest{};
      std::memcpy(&rest, values + i, rest_bytes);
      const Float e = Exp(rest, offset, exponent);
      std::memcpy(values + i, &e, rest_bytes);
      rest = Float{};
      std::memcpy(&rest, &e, rest_bytes);
      sum.Add(rest, HalfLanes());
    }
    return sum.Total();
  }

  static float MaxRow(const float* values, int64_t count) {
    float largest = values[0];
    bool nan = false;
    for (int64_t i = 0; i < count; ++i) {
      nan |= values[i] != values[i];
      largest = values[i] > largest ? values[i] : largest;
    }
    return nan ? __builtin_nanf("") : largest;
  }

  // A vector in memory that may end early: what is beyond the end reads as zeros and is not written.
  struct Whole {
    Float Load(const float* from) const { return LoadVector<Float>(from); }
    void Store(float* to, Float value) const { StoreVector(to, value); }
  };
  struct Part {
    size_t bytes;
    Float Load(const float* from) const {
      Float value{};
      std::memcpy(&value, from, bytes);
      return value;
    }
    void Store(float* to, Float value) const { std::memcpy(to, &value, bytes); }
  };

  // step(i, vector) for the vectors of a row.
  template <typename Step>
  static inline __attribute__((always_inline)) void ForVectors(int64_t count, const Step& step) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) step(i, Whole{});
    if (i < count) step(i, Part{static_cast<size_t>(count - i) * sizeof(float)});
  }

  // Both from q = e^(-2|t|), t = z / cap: tanh |t| = (1 - q) / (1 + q), and the derivative 4 q / (1 + q)^2
  // keeps its digits where tanh is so close to 1 that 1 - tanh² would not.
  static inline __attribute__((always_inline)) Float Cap(Float z, float cap, Float* factor) {
    const Float t = z / cap;
    const Float magnitude = t < 0.0f ? -t : t;
    const Float q = Exp(-2.0f * magnitude, 0.0f, 0);
    const Float denominator = q + 1.0f;
    *factor = 4.0f * q / (denominator * denominator);
    const Float far = (1.0f - q) / denominator * cap;
    // Near zero 1 - q would cancel: an odd polynomial of t (Cephes' tanhf).
    const Float square = t * t;
    Float p = Float{} - 5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const Float near = z + z * (p * square);
    const Float capped = magnitude < 0.625f ? near : (t < 0.0f ? -far : far);
    return capped + (z < 0.0f ? Float{} : z - z);  // NaN for NaN and +∞
  }

  static void CapRow(float* values, float* factors, int64_t count, float cap) {
    ForVectors(count, [=](int64_t i, const auto& vector) {
      Float factor;
      vector.Store(values + i, Cap(vector.Load(values + i), cap, &factor));
      vector.Store(factors + i, factor);
    });
  }

  static double SumRow(const float* values, const float* weights, int64_t count) {
    Sum sum;
    ForVectors(count, [&](int64_t i, const auto& vector) {
      if (weights == nullptr) {
        sum.Add(vector.Load(values + i), HalfLanes());
      } else {
        const Float weight = vector.Load(weights + i);
        // A weight of 0 means nothing, also of -∞.
        sum.AddProduct(weight != 0.0f ? vector.Load(values + i) : Float{}, weight, HalfLanes());
      }
    });
    return sum.Total();
  }

  static double MomentRow(const float* exponentials, const float* values, int64_t count, float largest) {
    Sum sum;
    ForVectors(count, [&](int64_t i, const auto& vector) {
      const Float e = vector.Load(exponentials + i);
      const Float below = vector.Load(values + i) - largest;
      sum.AddProduct(e, e > 0.0f ? below : Float{}, HalfLanes());
    });
    return sum.Total();
  }

  static void SpreadRow(float* exponentials, const float* values, int64_t count, const SpreadTerms& terms) {
    ForVectors(count, [=](int64_t i, const auto& vector) {
      const Float e = vector.Load(exponentials + i);
      const Float from_mean = vector.Load(values + i) - terms.largest - terms.mean;
      vector.Store(exponentials + i, e > 0.0f ? e * (terms.slope - terms.spread * from_mean) : Float{});
    });
  }

  static void GradientRow(float* values, const float* weights, const float* factors, int64_t count,
                          float slope, float level) {
    ForVectors(count, [=](int64_t i, const auto& vector) {
      const Float weight = weights == nullptr ? Float{} + 1.0f : vector.Load(weights + i);
      const Float factor = factors == nullptr ? Float{} + 1.0f : vector.Load(factors + i);
      vector.Store(values + i, (slope * vector.Load(values + i) - level * weight) * factor);
    });
  }

  static constexpr SimdKernels Table(const char* name) {
    return {.name = name,
            .tile_rows = kRows,
            .tile_columns = kColumns,
            .multiply_panels = &MultiplyPanels,
            .multiply_rows = &MultiplyRows,
            .pack_transposed = &PackTransposed,
            .pack = &Pack,
            .exp_row = &ExpRow,
            .max_row = &MaxRow,
            .cap_row = &CapRow,
            .sum_row = &SumRow,
            .moment_row = &MomentRow,
            .spread_row = &SpreadRow,
            .gradient_row = &GradientRow};
  }
};

}  // namespace
}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SIMD_KERNELS_INL_H_
