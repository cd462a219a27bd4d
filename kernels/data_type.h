// Element types of tensors and their conversions.
#ifndef LOSSD_KERNELS_DATA_TYPE_H_
#define LOSSD_KERNELS_DATA_TYPE_H_

#include <cstdint>

namespace lossd::kernels {

enum class DataType { kFloat32, kBFloat16, kFloat16 };
inline constexpr DataType kDataTypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};

// Bytes of one element.
constexpr int64_t SizeOf(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

constexpr const char* Name(DataType type) {
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

// Converts `count` elements. Widening is exact; narrowing rounds to nearest even and keeps NaN and infinity.
// `from` and `to` must not overlap unless they are the same address and type. Neither needs to be aligned.
void Convert(DataType from_type, const void* from, DataType to_type, void* to, int64_t count);

// Number of NaN or infinite elements.
int64_t CountNonFinite(DataType type, const void* values, int64_t count);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DATA_TYPE_H_
