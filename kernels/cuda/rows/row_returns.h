// The fields of RowReturns that need all logits of a row: entropy, prediction, rank and top k.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_ROWS_ROW_RETURNS_H_
#define LOSSD_KERNELS_CUDA_ROWS_ROW_RETURNS_H_

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"

namespace lossd::kernels::cuda {

// From the sums of the logits product [rows, stride], before bias, scale and softcap, in fp32. These rows are
// rows `first` to `first` + `rows` of the tile.
Result TellWholeRows(const TileRows& tile, int32_t first, int32_t rows, const float* sums, int64_t stride,
                     cudaStream_t stream);

// NaN or -1 for all of that of rows that have overflowed, which is known when the losses are.
Result ForgetOverflowedRows(const TileRows& tile, cudaStream_t stream);

Result LoadReturnKernels();

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_ROW_RETURNS_H_
