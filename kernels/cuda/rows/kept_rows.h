// Rows whose softmax is over a list of tokens: products with the rows of the weights that the lists name, and
// what comes between them. An entry is one token of one list.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_ROWS_KEPT_ROWS_H_
#define LOSSD_KERNELS_CUDA_ROWS_KEPT_ROWS_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/data_type.h"

namespace lossd::kernels::cuda {

// Lists of the rows of a tile. Entries are numbered within the batch.
struct KeptLists {
  const int32_t* offsets = nullptr;       // [rows + 1]
  const int32_t* tokens = nullptr;        // of each entry
  const int32_t* by_token = nullptr;      // KeptRows::by_token
  const int32_t* token_starts = nullptr;  // of the tile's different tokens, and an end
  int64_t different_tokens = 0;
  int64_t first_entry = 0;  // of the tile

  // Made, of the tile's entries: logits before the cap, then what W_v and x are multiplied by; and rows.
  float* values = nullptr;
  int32_t* rows = nullptr;  // null: not wanted
};

// values = τ (x W_v + b_v).
Result GatherLogits(const TileRows& tile, const KeptLists& lists, cudaStream_t stream);

// Losses and returns, and, where a gradient is wanted, `values` for it: of a row that overflowed 0. The
// tile's smoothing is kNone.
Result FinishLists(const TileRows& tile, const KeptLists& lists, cudaStream_t stream);

// out[batch_rows] = Σ values W_v, in the order of the list, rounded once to out_type; out [*, hidden]. NaN of
// a row that overflowed.
Result SumLists(const TileRows& tile, const KeptLists& lists, DataType out_type, void* out,
                cudaStream_t stream);

// dW[v] += Σ values x and, unless db is null, db[v] += Σ values, rows of one token in their order.
Result AddLists(const TileRows& tile, const KeptLists& lists, float* dw, float* db, cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type.
Result LoadKeptKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_KEPT_ROWS_H_
