// Label smoothing where it is a term of rank one: w̄ = Σ_v C_v W_v, its products with rows, and Σ_r τ γ_r x_r.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_LOSSES_SMOOTHING_H_
#define LOSSD_KERNELS_CUDA_LOSSES_SMOOTHING_H_

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cuda {

// out[h] = Σ_v C_v W_v[h], summed in fp64 in a fixed order; weight [vocab, padded_hidden] and out
// [padded_hidden]; class_weights [vocab], or null for C = 1.
Result SumVocabulary(DataType type, const void* weight, int64_t vocab, int64_t padded_hidden,
                     const float* class_weights, float* out, cudaStream_t stream);

// smoothing_logits = x · vocabulary_sum, and with a bias its sum, in fp64.
Result MultiplyVocabularySum(const TileRows& tile, cudaStream_t stream);

// t (+)= Σ_r τ γ_r x_r over the rows that count in dW, in a fixed order; t [padded_hidden]. kNone does
// nothing.
Result AddSmoothing(const TileRows& tile, WeightGradient store, float* t, cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type.
Result LoadSmoothingKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_LOSSES_SMOOTHING_H_
