// What the CPU step keeps of the rows of a tile in one segment of the vocabulary.
#ifndef LOSSD_KERNELS_CPU_WORKSPACE_H_
#define LOSSD_KERNELS_CPU_WORKSPACE_H_

#include <cstdint>
#include <limits>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/rounding.h"
#include "kernels/target_shares.h"

namespace lossd::kernels::cpu {

// Panels of the widest instruction set divide this.
inline constexpr int64_t kColumnAlignment = 32;
// Rows of logits that the library's products make at once; a multiple of kRowAlignment.
inline constexpr int64_t kLibraryRows = 1020;
// Entries of the vocabulary in a block of the library's products: longer sums in registers than kBlock gives
// (12 % of the whole step on AMX). Our own products keep a block of the weights in the cache, and want
// kBlock.
inline constexpr int64_t kLibraryBlock = 512;

// The state of one row of a tile in a segment.
struct RowState {
  int64_t index = 0;  // in the batch
  int64_t label = 0;  // counted from the segment's first entry: it is another segment's if it is not in there
  float offset = 0;   // E = e^(z - offset) 2^-exponent
  int32_t exponent = 0;
  bool overflowed = false;  // a logit is not finite, or its gradient would not be
  bool redone = false;      // its offset was out of range
  bool weightless = false;  // its gradient is 0
  float largest = 0;        // magnitude in X, rounded to the weight's type
  float target_logit = 0;
  float target_exponential = 0;  // the label's own E, kept here and zeroed in the tile
  double sum = 0;                // over all of the row's E in the segment, with the label's own
  float scale = 0;               // v = g / sum, sum that of all segments
  float target_gradient = 0;     // g (p_y - 1)
};

// More state of a row, for some options and returns.
struct RowDetail {
  float label_factor = 1;  // softcap's derivative at the label
  // The tile's gradient is (slope - spread (s - largest - mean)) E - level C, times softcap's derivative.
  float slope = 0;
  float level = 0;
  float spread = 0;
  float largest = 0;  // these two are of the whole row
  float mean = 0;
  // The row's list of soft targets has a slope of its own, and a factor of q.
  float listed_slope = 0;
  float target = 0;
  TargetSums targets = {};  // of soft targets on a list
  float label_logit = 0;    // known before the row's first block
  int32_t above = 0;        // logits above it, so far; added to by any thread
  int32_t lock = 0;         // of the row's list of largest logits
  int32_t listed = 0;
  float least = -std::numeric_limits<float>::infinity();  // what a logit must reach to enter the list
};
struct BlockDetail {
  double weighted_logits = 0;  // sum of C s
  double moment = 0;           // sum of E (s - largest)
  float largest = 0;           // s
};

// Sizes and pointers of a tile of rows and one segment. X and the scratch are those of all segments.
// Matrices:
//   exponentials  [blocks][padded_rows][block_columns] of operand_type, E
//   x             [padded_rows][hidden] of operand_type, in an order of Products' own; X
//   dx            [padded_rows][padded_hidden] fp32, E W; later v X as Products stores it
//   block_values  [blocks][padded_rows] fp64, sums of E or maxima of logits
// With RowRecord::kFull also
//   block_details [blocks][padded_rows]
//   top_logits, top_tokens  [padded_rows][kMostTopK], largest first
struct Workspace {
  int64_t rows = 0;
  int64_t padded_rows = 0;
  int64_t block_columns = 0;  // entries of the vocabulary in a block
  int64_t blocks = 0;         // none where the segment has no entries
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
  BlockDetail* block_details = nullptr;
  RowDetail* row_details = nullptr;
  float* top_logits = nullptr;
  int32_t* top_tokens = nullptr;

  float* Scratch(int64_t thread) const { return scratch + thread * scratch_floats; }
  int64_t ExponentialsIndex(int64_t block, int64_t row) const {
    return (block * padded_rows + row) * block_columns;
  }
  double& BlockValue(int64_t block, int64_t row) const { return block_values[block * padded_rows + row]; }
  BlockDetail& Detail(int64_t block, int64_t row) const { return block_details[block * padded_rows + row]; }
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_WORKSPACE_H_
