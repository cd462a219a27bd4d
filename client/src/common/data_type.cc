#include "client/src/common/data_type.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace lossd {

int64_t SizeOf(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

const char* Name(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return "float32";
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kFloat16:
      return "float16";
  }
  return "unknown";
}

namespace internal {
namespace {

// Elements worked on at once: two buffers of them stay in the first-level cache.
constexpr int64_t kBlock = 1024;

float FromBFloat16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t ToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // A NaN whose payload is all in the lower half would round to infinity: keep it quiet instead.
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

float FromFloat16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fU;
  const uint32_t mantissa = half & 0x3ffU;
  if (exponent == 0x1fU) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa · 2⁻²⁴, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
}

uint16_t ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
  if (magnitude >= 0x47800000U) return static_cast<uint16_t>(sign | 0x7c00U);  // 2¹⁶ and above
  if (magnitude < 0x38800000U) {
    // Below 2⁻¹⁴ the result is a multiple of 2⁻²⁴: adding 1/2 leaves exactly that many bits, rounded to even.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
  }
  const uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

void Widen(DataType type, const unsigned char* from, float* to, int64_t count) {
  if (type == DataType::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t narrow[kBlock];
  std::memcpy(narrow, from, static_cast<size_t>(count) * sizeof(uint16_t));
  if (type == DataType::kBFloat16) {
    std::transform(narrow, narrow + count, to, FromBFloat16);
  } else {
    std::transform(narrow, narrow + count, to, FromFloat16);
  }
}

void Narrow(DataType type, const float* from, unsigned char* to, int64_t count) {
  if (type == DataType::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t narrow[kBlock];
  if (type == DataType::kBFloat16) {
    std::transform(from, from + count, narrow, ToBFloat16);
  } else {
    std::transform(from, from + count, narrow, ToFloat16);
  }
  std::memcpy(to, narrow, static_cast<size_t>(count) * sizeof(uint16_t));
}

}  // namespace

void ConvertElements(DataType from_type, const void* from, DataType to_type, void* to, int64_t count) {
  if (count == 0) return;
  const auto* source = static_cast<const unsigned char*>(from);
  auto* target = static_cast<unsigned char*>(to);
  if (from_type == to_type) {
    std::memcpy(target, source, static_cast<size_t>(count * SizeOf(from_type)));
    return;
  }
  float wide[kBlock];
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t size = std::min(kBlock, count - done);
    Widen(from_type, source + done * SizeOf(from_type), wide, size);
    Narrow(to_type, wide, target + done * SizeOf(to_type), size);
  }
}

}  // namespace internal
}  // namespace lossd
