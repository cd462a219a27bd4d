// Conversions between the element types of tensors (sizes and names are in lossd/client.h).
#ifndef LOSSD_CLIENT_SRC_COMMON_DATA_TYPE_H_
#define LOSSD_CLIENT_SRC_COMMON_DATA_TYPE_H_

#include <cstdint>

#include "lossd/client.h"

namespace lossd::internal {

// Converts `count` elements. Widening is exact; narrowing rounds to nearest even, turns what is too large
// into infinity and keeps NaN and infinity. The ranges must not overlap; neither needs to be aligned.
// Thread-safe.
void ConvertElements(DataType from_type, const void* from, DataType to_type, void* to, int64_t count);

// The type in which a head's weights travel, in writes and in reads as fp32: it loses nothing that the server
// keeps, and sends no useless byte.
inline DataType StagedType(const HeadConfig& head) {
  return head.master_weights ? DataType::kFloat32 : head.weight_type;
}

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_COMMON_DATA_TYPE_H_
