// What phase one of rows leaves for phase two of the same rows ("A function of the losses: two phases",
// docs/losses.md): E, its sums, and in which units. And entries of the logits' gradient made of E as it was
// rounded, whether it was held or has just been made.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_ROWS_HELD_ROWS_H_
#define LOSSD_KERNELS_CUDA_ROWS_HELD_ROWS_H_

#include <cstdint>

#include "kernels/cuda/memory/heads.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"

namespace lossd::kernels::cuda {

// Memory for so many rows of a head. Whoever owns it says which rows are whose, and which are still good: E
// is of one label, logit scale and bias, and of the weights that there were.
struct HoldSpace {
  static constexpr int64_t kPieceColumns = 192;  // of the vocabulary, whose sums are one number

  int64_t rows = 0;              // that there is room for
  int64_t pieces = 0;            // of the vocabulary, in sums
  int64_t stride = 0;            // of exponentials, in elements
  char* exponentials = nullptr;  // E [rows, stride] of the head's type
  float* sums = nullptr;         // Σ E [pieces, rows], without the label's
  float* moments = nullptr;      // Σ E (s - offset), likewise; of rows that had them
  float* offsets = nullptr;      // [rows], and so below
  int32_t* exponents = nullptr;
  float* target_logits = nullptr;

  // As many rows as fit `bytes` from `base` on, which is 256-byte aligned; base may be null. Rows of phase
  // one are held one after the other.
  static HoldSpace In(const HeadShape& shape, int64_t bytes, void* base);
};

// Rows of a tile that were held: what the tile's sums and units are. `rows` [tile.rows]: where each is held;
// null: one after the other from `first` on.
// A row whose label's logit is another than it was then has other hidden states: it becomes an overflowed
// one.
struct TakenRows {
  const HoldSpace* space = nullptr;
  const int32_t* rows = nullptr;
  int64_t first = 0;
  float* sums = nullptr;     // [pieces, stride], to be written
  float* moments = nullptr;  // the same; null: not wanted
  int64_t stride = 0;
};
Result TakeHeldRows(const TileRows& tile, const TakenRows& taken, cudaStream_t stream);

// Entries of the tile's rows [rows, stride] from E: E itself, or where the tile is spread
// (A - D (s - offset - M)) E, as FormEntries has it, with s from E's logarithm. `places` [tile.rows]: which
// of E's rows each is; null: its own. `entries` may be E if they are its own.
Result CopyEntries(const TileRows& tile, const void* exponentials, const int32_t* places, void* entries,
                   int64_t stride, cudaStream_t stream);

Result LoadHeldRowKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_HELD_ROWS_H_
