// Descriptions of matrices for Hopper's tensor copy engine.
#ifndef LOSSD_KERNELS_CUDA_MEMORY_TENSOR_MAP_H_
#define LOSSD_KERNELS_CUDA_MEMORY_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/data_type.h"

namespace lossd::kernels::cuda {

// A row-major matrix [outer, inner] of a 16-bit type whose rows are `stride` elements apart (a multiple of 8;
// `data` is 16-byte aligned), copied in boxes of [box_outer, box_inner] with the 128-byte swizzle. What a box
// covers outside the matrix reads as zero.
Result MakeTensorMap(DataType type, const void* data, int64_t inner, int64_t outer, int64_t stride,
                     int32_t box_inner, int32_t box_outer, CUtensorMap* map);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_MEMORY_TENSOR_MAP_H_
