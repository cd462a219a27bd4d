// How the CPU step divides its workspace.
#ifndef LOSSD_KERNELS_CPU_WORKSPACE_H_
#define LOSSD_KERNELS_CPU_WORKSPACE_H_

#include <cstdint>

#include "kernels/cpu/simd_kernels.h"

namespace lossd::kernels::cpu {

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDivide(a, b) * b; }

// Panels of the widest instruction set divide this.
inline constexpr int64_t kColumnAlignment = 32;
// Floats of one thread's scratch: one packed operand of kBlock x kBlock, with room for the last panel's
// padding.
inline constexpr int64_t kScratchFloats = kBlock * (kBlock + kColumnAlignment);

// What the step knows of one row of a tile.
struct RowState {
  int64_t index = 0;  // in the batch
  int64_t label = 0;
  float offset = 0;  // E = e^(z - offset) 2^-exponent
  int32_t exponent = 0;
  bool exact_offset = false;  // offset comes from the true maximum
  bool overflowed = false;    // a logit is not finite
  float target_logit = 0;
  float target_exponential = 0;  // the label's own E, kept here and zeroed in the tile
  double sum = 0;                // over all of the row's E, with the label's own
  float scale = 0;               // v = g / sum
  float target_gradient = 0;     // g (p_y - 1)
};

// Sizes and pointers of a tile of rows. Matrices:
//   exponentials  [blocks][padded_rows][kBlock]  E, first holding the logits
//   x             panels of tile_rows rows       X rounded to the weight's type
//   dx            [padded_rows][padded_hidden]   E W; later panels of v X
//   block_sums    [blocks][padded_rows]
struct Workspace {
  int64_t rows = 0;
  int64_t padded_rows = 0;
  int64_t blocks = 0;
  int64_t padded_hidden = 0;
  int64_t threads = 0;  // that have scratch
  float* exponentials = nullptr;
  float* x = nullptr;
  float* dx = nullptr;
  double* block_sums = nullptr;
  RowState* row_states = nullptr;
  float* scratch = nullptr;

  float* Scratch(int64_t thread) const { return scratch + thread * kScratchFloats; }
  float* Exponentials(int64_t block, int64_t row) const {
    return exponentials + (block * padded_rows + row) * kBlock;
  }
};

// Lays out a workspace for `rows` rows at `base`, which may be null to learn the size only. Returns its
// bytes, or INT64_MAX if they do not fit.
int64_t LayOut(int64_t rows, int64_t vocab, int64_t hidden, void* base, Workspace* workspace);

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_WORKSPACE_H_
