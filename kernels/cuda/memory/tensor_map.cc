#include "kernels/cuda/memory/tensor_map.h"

namespace lossd::kernels::cuda {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// The driver's own function: asked for at run time, so that programs start on machines without a driver.
Result FindEncode(EncodeFunction* encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned int kVersion = 12000;  // the first with this function
  LOSSD_CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kVersion,
                                                  cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) return {cudaErrorNotSupported, "finding cuTensorMapEncodeTiled"};
  *encode = reinterpret_cast<EncodeFunction>(function);
  return {};
}

}  // namespace

Result MakeTensorMap(DataType type, const void* data, int64_t inner, int64_t outer, int64_t stride,
                     int32_t box_inner, int32_t box_outer, CUtensorMap* map) {
  static EncodeFunction encode = nullptr;
  if (encode == nullptr) LOSSD_CUDA_PASS_ON(FindEncode(&encode));
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * SizeOf(type))};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_inner), static_cast<cuuint32_t>(box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  const CUtensorMapDataType map_type =
      type == DataType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = encode(map, map_type, 2, const_cast<void*>(data), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {cudaErrorInvalidValue, "cuTensorMapEncodeTiled"};
  return {};
}

}  // namespace lossd::kernels::cuda
