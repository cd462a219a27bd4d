// From whole logits of a head and of its teacher to everything of a row: its loss with the divergence, what
// follows from it, and the gradient of its logits. Formulas: "Soft targets" in docs/numerics.md.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_LOSSES_SOFT_TARGETS_H_
#define LOSSD_KERNELS_CUDA_LOSSES_SOFT_TARGETS_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cuda {

struct SoftTargets {
  Distillation options;
  LossOptions teacher_options;          // its scale and softcap
  const float* teacher_bias = nullptr;  // [vocab]; null: none
  // PrepareRows' of the teacher, one element a row of the tile.
  const float* teacher_target_logits = nullptr;
  const int32_t* teacher_overflowed = nullptr;

  // The products' sums [rows, stride], before bias, scale and softcap, of some rows of the tile. Rows begin
  // at multiples of 32 bytes.
  const float* sums = nullptr;
  const float* teacher_sums = nullptr;
  // What the products for dX and dW take, over a power of two of the row's (which v has): [tile's rows,
  // stride] of its type, 16-byte aligned; the label's entry is 0. Null: none is wanted.
  void* gradients = nullptr;
  int64_t stride = 0;  // a multiple of 8
};

// Finishes rows `first` to `first` + `rows` of the tile, whose logits are the first of `sums`. Writes losses,
// returns that are functions of sums, v, c and overflows.
Result FinishSoftRows(const TileRows& tile, int32_t first, int32_t rows, const SoftTargets& targets,
                      cudaStream_t stream);

// Loads every kernel that the function above may launch for heads of this type.
Result LoadSoftTargetKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_LOSSES_SOFT_TARGETS_H_
