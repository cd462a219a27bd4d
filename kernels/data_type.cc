#include "kernels/data_type.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

namespace lossd::kernels {
namespace {

// Loads and stores through memcpy: callers' buffers may lie at any address.
template <typename T>
T Load(const void* base, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <typename T>
void Store(void* base, int64_t index, T value) {
  std::memcpy(static_cast<char*>(base) + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

struct Float32 {
  using Bits = uint32_t;
  static float Widen(Bits bits) { return std::bit_cast<float>(bits); }
  static Bits Narrow(float value) { return std::bit_cast<Bits>(value); }
  static bool IsFinite(Bits bits) { return (bits & 0x7f800000u) != 0x7f800000u; }
};

struct BFloat16 {
  using Bits = uint16_t;
  static float Widen(Bits bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static Bits Narrow(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;  // rounding a NaN could turn it into infinity or zero
    return static_cast<Bits>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
  }
  static bool IsFinite(Bits bits) { return (bits & 0x7f80u) != 0x7f80u; }
};

struct Float16 {
  using Bits = uint16_t;
  static float Widen(Bits bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    // Denormals: the magnitude counts units of 2^-24, which fp32 holds exactly.
    const uint32_t small =
        std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
    const uint32_t special = (magnitude << 13) | 0x7f800000u;  // infinity and NaN keep their payload
    const uint32_t finite = magnitude < 0x0400u ? small : normal;
    return std::bit_cast<float>(sign | (magnitude >= 0x7c00u ? special : finite));
  }
  static Bits Narrow(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14 the result counts units of 2^-24: adding 0.5 makes fp32's own rounding do the work.
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
    uint32_t result = magnitude < 0x38800000u ? small : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520 and above round to infinity
    result = magnitude > 0x7f800000u ? nan : result;
    return static_cast<Bits>(sign | result);
  }
  static bool IsFinite(Bits bits) { return (bits & 0x7c00u) != 0x7c00u; }
};

template <typename From, typename To>
void ConvertAs(const void* from, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Store(to, i, To::Narrow(From::Widen(Load<typename From::Bits>(from, i))));
  }
}

template <typename From>
void ConvertFrom(const void* from, DataType to_type, void* to, int64_t count) {
  switch (to_type) {
    case DataType::kFloat32:
      return ConvertAs<From, Float32>(from, to, count);
    case DataType::kBFloat16:
      return ConvertAs<From, BFloat16>(from, to, count);
    case DataType::kFloat16:
      return ConvertAs<From, Float16>(from, to, count);
  }
}

// Magnitudes order like their bits, and the largest tells of all: a loop that fits into the widths of the
// elements, where counting would not.
template <typename Type>
bool AllFinite(const void* values, int64_t count) {
  using Bits = typename Type::Bits;
  using Signed = std::make_signed_t<Bits>;
  constexpr Bits kMagnitude = std::numeric_limits<Signed>::max();
  Signed largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, static_cast<Signed>(Load<Bits>(values, i) & kMagnitude));
  }
  return Type::IsFinite(static_cast<Bits>(largest));
}

template <typename Type>
int64_t CountNonFiniteAs(const void* values, int64_t count) {
  constexpr int64_t kBlock = 4096;
  int64_t found = 0;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    const void* block =
        static_cast<const char*>(values) + first * static_cast<int64_t>(sizeof(typename Type::Bits));
    if (AllFinite<Type>(block, size)) continue;
    for (int64_t i = 0; i < size; ++i) found += !Type::IsFinite(Load<typename Type::Bits>(block, i));
  }
  return found;
}

}  // namespace

void Convert(DataType from_type, const void* from, DataType to_type, void* to, int64_t count) {
  if (count <= 0) return;
  if (from_type == to_type) {
    std::memmove(to, from, static_cast<size_t>(count * SizeOf(from_type)));
    return;
  }
  switch (from_type) {
    case DataType::kFloat32:
      return ConvertFrom<Float32>(from, to_type, to, count);
    case DataType::kBFloat16:
      return ConvertFrom<BFloat16>(from, to_type, to, count);
    case DataType::kFloat16:
      return ConvertFrom<Float16>(from, to_type, to, count);
  }
}

int64_t CountNonFinite(DataType type, const void* values, int64_t count) {
  switch (type) {
    case DataType::kFloat32:
      return CountNonFiniteAs<Float32>(values, count);
    case DataType::kBFloat16:
      return CountNonFiniteAs<BFloat16>(values, count);
    case DataType::kFloat16:
      return CountNonFiniteAs<Float16>(values, count);
  }
  return 0;
}

}  // namespace lossd::kernels
