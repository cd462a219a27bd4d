// What the portable path does between cuBLAS's products.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_PORTABLE_SOFTMAX_ROWS_H_
#define LOSSD_KERNELS_CUDA_PORTABLE_SOFTMAX_ROWS_H_

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/data_type.h"

namespace lossd::kernels::cuda {

// In place: sums of products [rows, stride] in fp32 become E, of the weight's type, at the beginning of each
// row's bytes; columns up to `stride` are zero. Losses, v, c and what else FinishRows makes.
Result SoftmaxRows(const TileRows& tile, float* logits, int64_t stride, cudaStream_t stream);

// out[batch_rows] = v product + c W_y - τ γ Σ C_v W_v, rounded once to out_type; product [rows,
// padded_hidden], out [*, hidden].
Result FinishInputGradient(const TileRows& tile, const float* product, DataType out_type, void* out,
                           cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type.
Result LoadPortableKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PORTABLE_SOFTMAX_ROWS_H_
