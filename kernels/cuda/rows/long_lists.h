// Rows whose softmax is over a long list of tokens, between products with the whole of the weights: from the
// product's logits to those of the lists, and from the lists' factors to the entries of the logits' gradient.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_ROWS_LONG_LISTS_H_
#define LOSSD_KERNELS_CUDA_ROWS_LONG_LISTS_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/kept_rows.h"
#include "kernels/cuda/rows/row_kernels.h"

namespace lossd::kernels::cuda {

// values = τ (x W_v + b_v) of `rows` rows of the tile from `first` on. sums [rows, stride]: their x W.
Result PickLogits(const TileRows& tile, const KeptLists& lists, int32_t first, int32_t rows,
                  const float* sums, int64_t stride, cudaStream_t stream);

// entries [tile's rows, stride], of the tile's type: `values` as FinishLists leaves them, over a power of two
// of the row's (its scale v), at the places of their tokens; 0 elsewhere and in the place of the label, whose
// value is the row's target gradient. Both are NaN of a row that overflowed.
Result SpreadLists(const TileRows& tile, const KeptLists& lists, void* entries, int64_t stride,
                   cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type.
Result LoadLongListKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_LONG_LISTS_H_
