// How the CPU step divides its workspace.
#ifndef LOSSD_KERNELS_CPU_WORKSPACE_H_
#define LOSSD_KERNELS_CPU_WORKSPACE_H_

#include <cstdint>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/rounding.h"

namespace lossd::kernels::cpu {

// Panels of the widest instruction set divide this.
inline constexpr int64_t kColumnAlignment = 32;
// Rows of logits that the library's products make at once; a multiple of kRowAlignment.
inline constexpr int64_t kLibraryRows = 1020;
// Entries of the vocabulary in a block of the library's products: longer sums in registers than kBlock gives
// (12 % of the whole step on AMX). Our own products keep a block of the weights in the cache, and want
// kBlock.
inline constexpr int64_t kLibraryBlock = 512;

// What the step knows of one row of a tile.
struct RowState {
  int64_t index = 0;  // in the batch
  int64_t label = 0;
  float offset = 0;  // E = e^(z - offset) 2^-exponent
  int32_t exponent = 0;
  bool overflowed = false;  // a logit is not finite, or its gradient would not be
  float largest = 0;        // magnitude in X, rounded to the weight's type
  float target_logit = 0;
  float target_exponential = 0;  // the label's own E, kept here and zeroed in the tile
  double sum = 0;                // over all of the row's E, with the label's own
  float scale = 0;               // v = g / sum
  float target_gradient = 0;     // g (p_y - 1)
};

// Sizes and pointers of a tile of rows. Matrices:
//   exponentials  [blocks][padded_rows][block_columns] of operand_type, E
//   x             [padded_rows][hidden] of operand_type, in an order of Products' own; X
//   dx            [padded_rows][padded_hidden] fp32, E W; later v X as Products stores it
//   block_values  [blocks][padded_rows] fp64, sums of E or maxima of logits
struct Workspace {
  int64_t rows = 0;
  int64_t padded_rows = 0;
  int64_t block_columns = 0;  // entries of the vocabulary in a block
  int64_t blocks = 0;
  int64_t padded_hidden = 0;
  DataType operand_type = DataType::kFloat32;
  int64_t threads = 0;         // that have scratch
  int64_t scratch_floats = 0;  // of each
  void* exponentials = nullptr;
  void* x = nullptr;
  float* dx = nullptr;
  double* block_values = nullptr;
  RowState* row_states = nullptr;
  float* scratch = nullptr;

  float* Scratch(int64_t thread) const { return scratch + thread * scratch_floats; }
  int64_t ExponentialsIndex(int64_t block, int64_t row) const {
    return (block * padded_rows + row) * block_columns;
  }
  double& BlockValue(int64_t block, int64_t row) const { return block_values[block * padded_rows + row]; }
};

// Lays out a workspace for `rows` rows at `base`, which may be null to learn the size only. Returns its
// bytes, or INT64_MAX if they do not fit.
int64_t LayOut(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic, void* base,
               Workspace* workspace);

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_WORKSPACE_H_
