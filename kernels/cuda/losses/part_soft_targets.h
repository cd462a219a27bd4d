// FinishSoftRows (soft_targets.h) where the logits of a row come from parts of the vocabulary, for 16-bit
// heads. Each step but the last is of one part, whose entries alone the tile describes, and takes what all
// parts found in those before.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_LOSSES_PART_SOFT_TARGETS_H_
#define LOSSD_KERNELS_CUDA_LOSSES_PART_SOFT_TARGETS_H_

#include <cstdint>

#include "kernels/cuda/losses/soft_parts.h"
#include "kernels/cuda/losses/soft_targets.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"

namespace lossd::kernels::cuda {

// What parts find of some rows: arrays [parts, rows].
struct SoftPieces {
  int32_t parts = 0;
  int32_t rows = 0;
  SoftPart* found = nullptr;
  SoftTerms* terms = nullptr;
  int32_t* bad = nullptr;  // 0 or 1; where entries are formed after the terms
};

// Rows `first` to `first` + rows of the tile, of which `part` is this.
struct SoftPartRows {
  int32_t first = 0;
  int32_t part = 0;
};

// found.
Result FindSoftParts(const TileRows& tile, const SoftPartRows& rows, const SoftTargets& targets,
                     const SoftPieces& pieces, cudaStream_t stream);
// terms, and the gradients unless they take the terms of all parts.
Result FindSoftTerms(const TileRows& tile, const SoftPartRows& rows, const SoftTargets& targets,
                     const SoftPieces& pieces, cudaStream_t stream);
// Whether the gradients, if any are wanted, take the terms of all parts; then this makes them, and bad.
LOSSD_HOST_DEVICE constexpr bool FormsAfterTerms(Divergence divergence) {
  return divergence == Divergence::kJensenShannon;
}
Result FormSoftEntries(const TileRows& tile, const SoftPartRows& rows, const SoftTargets& targets,
                       const SoftPieces& pieces, cudaStream_t stream);
// Writes what FinishSoftRows does beside the gradients. c is 0 where the label is not among the tile's
// entries.
Result FinishSoftParts(const TileRows& tile, int32_t first, const SoftTargets& targets,
                       const SoftPieces& pieces, cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type.
Result LoadPartSoftTargetKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_LOSSES_PART_SOFT_TARGETS_H_
