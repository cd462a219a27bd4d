// Between the library's element types and those of safetensors files.
#ifndef LOSSD_CLIENT_SRC_COMMON_SAFETENSORS_TYPE_H_
#define LOSSD_CLIENT_SRC_COMMON_SAFETENSORS_TYPE_H_

#include "lossd/client.h"
#include "proto/safetensors/safetensors.h"

namespace lossd::internal {

inline SafetensorsType ToSafetensors(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return SafetensorsType::kFloat32;
    case DataType::kBFloat16:
      return SafetensorsType::kBFloat16;
    case DataType::kFloat16:
      return SafetensorsType::kFloat16;
  }
  return SafetensorsType::kFloat32;
}

inline DataType FromSafetensors(SafetensorsType type) {
  switch (type) {
    case SafetensorsType::kFloat32:
      return DataType::kFloat32;
    case SafetensorsType::kBFloat16:
      return DataType::kBFloat16;
    case SafetensorsType::kFloat16:
      return DataType::kFloat16;
  }
  return DataType::kFloat32;
}

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_COMMON_SAFETENSORS_TYPE_H_
