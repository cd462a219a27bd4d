// How the step of linear_cross_entropy.h divides its workspace. For the files that it is in.
#ifndef LOSSD_KERNELS_CUDA_STEP_BUFFERS_H_
#define LOSSD_KERNELS_CUDA_STEP_BUFFERS_H_

#include <cstdint>

#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/rows/tile_buffers.h"

namespace lossd::kernels::cuda {

inline constexpr int64_t kWholeRows = 256;  // of a cluster's tile in every product

struct LinearCrossEntropy::Buffers {
  char* exponentials = nullptr;  // E, or fp32 logits, or what has its place before E is made
  int64_t stride = 0;            // of its rows, in elements
  char* x = nullptr;
  char* scaled_x = nullptr;
  float* partials = nullptr;  // sums of E, or maxima, of columns of the vocabulary
  float* moments = nullptr;   // sums of E (s - offset), of a tile that is spread
  float* product = nullptr;   // E W of the portable path
  char* library = nullptr;    // cuBLAS's own
  RowArrays rows;

  // For a tile (PlaceTile): where E is made, what the products for gradients take, and the sums and moments,
  // which are all those above unless there is a hold.
  char* made = nullptr;  // null: only sums are wanted
  const char* entries = nullptr;
  float* sums = nullptr;
  int64_t sums_stride = 0;
  // Rows that were held: where, from the first on or by `held_rows`.
  const char* held = nullptr;
  int64_t first_held = 0;
  const int32_t* held_rows = nullptr;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_STEP_BUFFERS_H_
