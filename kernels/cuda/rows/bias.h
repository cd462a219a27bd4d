// A head's bias: its gradient, and what label smoothing of rank one needs of it. Where it is added to logits
// is everywhere that sees them.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_ROWS_BIAS_H_
#define LOSSD_KERNELS_CUDA_ROWS_BIAS_H_

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/data_type.h"

namespace lossd::kernels::cuda {

// The largest of 0 and the bias's values into *largest; infinite if one is not finite. Values far below 0
// mask entries, and are no overflow.
Result LargestShift(const float* bias, int64_t vocab, float* largest, cudaStream_t stream);

// *out = Σ_v C_v b_v, summed in fp64 in a fixed order; bias [vocab]; class_weights [vocab], or null for C
// = 1.
Result SumBias(const float* bias, int64_t vocab, const float* class_weights, double* out,
               cudaStream_t stream);

// db_v = or += Σ_r of the gradient of the logit z_v over the rows that count in dW, in a fixed order: v_r
// E_rv, c_r of the rows whose label it is, and of Smoothing::kRankOne - τ γ_r C_v. `exponentials` is what the
// product for dW takes, of the weight's type: E, or the entries of the logits' gradient. Rows are `stride`
// elements apart, a multiple of 8, and begin with vocab columns, rounded up to 8; db [vocab].
enum class BiasStore { kOverwrite, kAdd };
Result AddBiasGradient(const TileRows& tile, const void* exponentials, int64_t stride, BiasStore store,
                       float* db, cudaStream_t stream);

// The same for a tile of any head: nothing where db is null, and of rows without a bias zeros, if they
// overwrite.
Result StoreBiasGradient(const TileRows& tile, const void* exponentials, int64_t stride, bool overwrite,
                         float* db, cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type.
Result LoadBiasKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_BIAS_H_
