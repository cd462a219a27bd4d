// kernels/blend.h on a CUDA device, in one pass over memory.
//
// All pointers are device memory, aligned to 8 bytes. Functions enqueue on `stream` and return at once; an
// error is the launch's. Padding among the elements is treated as they are: zeros stay zeros.
#ifndef LOSSD_KERNELS_CUDA_OPTIMIZER_BLEND_H_
#define LOSSD_KERNELS_CUDA_OPTIMIZER_BLEND_H_

#include <cstdint>

#include "kernels/blend.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/data_type.h"

namespace lossd::kernels::cuda {

// `source.type` is fp32 or that of the target's weight.
Result Blend(const BlendTarget& target, const BlendSource& source, const BlendFactors& factors,
             cudaStream_t stream);

// master = weight, of a 16-bit type.
Result WidenWeights(DataType weight_type, const void* weight, int64_t count, float* master,
                    cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type.
Result LoadBlendKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_OPTIMIZER_BLEND_H_
