// Soft targets on lists: what a row's list adds up to before its sums are known, and its entries of the
// logits' gradient, which stand among those of all other tokens.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_LOSSES_TARGET_LISTS_H_
#define LOSSD_KERNELS_CUDA_LOSSES_TARGET_LISTS_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/data_type.h"

namespace lossd::kernels::cuda {

// Lists of the rows of a tile. Entries are numbered within the batch.
struct ListedTargets {
  const int32_t* offsets = nullptr;      // [rows + 1]
  const int32_t* tokens = nullptr;       // of each entry
  const float* probabilities = nullptr;  // q
  float* logits = nullptr;               // made, before the cap
};

// The logits of the lists and tile.target_sums, of rows that PrepareRows has gone through.
Result SumTargets(const TileRows& tile, const ListedTargets& lists, cudaStream_t stream);

// Puts the entries of the lists into those of the tile's rows [rows, stride] of its type, but for the
// label's, which is apart.
Result PutTargets(const TileRows& tile, const ListedTargets& lists, void* entries, int64_t stride,
                  cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type.
Result LoadTargetListKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_LOSSES_TARGET_LISTS_H_
