// The valid rows of a batch as the step wants them. Host memory only.
#ifndef LOSSD_KERNELS_CUDA_ROWS_BATCH_ROWS_H_
#define LOSSD_KERNELS_CUDA_ROWS_BATCH_ROWS_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cuda {

// Rows that stand one after the other in a batch and are treated alike.
struct LabelledRows {
  const int64_t* labels = nullptr;  // [tokens]
  int64_t tokens = 0;
  int64_t ignore_index = -100;
  float gradient_scale = 1.0f;
  float share = 1.0f;                          // 1: counts in dW, 0: does not
  std::optional<float> z_gradient_scale = {};  // none: gradient_scale
  const float* token_weights = nullptr;        // [tokens]; null: 1
  const float* lse_gradients = nullptr;        // [tokens]; null: 0
  const float* entropy_gradients = nullptr;    // [tokens]; null: 0
  TokenLists kept_tokens = {};                 // of all parts of a batch, or of none
  TargetLists target_lists = {};               // the same
  // Whether anything is wanted of rows that is not 0 where all their factors are (RowReturns::unweighted).
  bool wants_unweighted = false;
};

// Rows of a batch that are worked on at once, and where their lists lie among those of the batch.
struct KeptTile {
  bool is_long = false;  // all of its lists are, or none

  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_entry = 0;
  int64_t entries = 0;
  int64_t first_token = 0;  // in `token_starts`, unless it is long
  int64_t tokens = 0;       // different ones in the tile
};

// Lists of the rows of a batch; without lists all is empty.
struct KeptRows {
  int64_t short_rows = 0;        // come first
  std::vector<int32_t> offsets;  // [rows + 1], within `tokens`
  std::vector<int32_t> tokens;
  // Entries of each tile that is not long in order of tokens, those of one token in order of rows; and where
  // each token's begin there, with the end of all of them behind the last.
  std::vector<int32_t> by_token;
  std::vector<int32_t> token_starts;
  std::vector<KeptTile> tiles;
};

// Soft targets of the rows of a batch; without any all is empty.
struct TargetRows {
  std::vector<int32_t> offsets;  // [rows + 1], within `tokens`
  std::vector<int32_t> tokens;
  std::vector<float> probabilities;  // of each of these
};

// Labels, row numbers and factors of a batch: the rows alone that are to be computed. Arrays have one element
// a row; those that may be empty are if every element would be what it is in a plain step.
struct BatchRows {
  int64_t rows = 0;
  std::vector<int32_t> batch_rows;
  std::vector<int32_t> labels;
  std::vector<float> gradient_scales;
  std::vector<float> z_gradient_scales;  // or empty: they are gradient_scales
  std::vector<float> token_weights;      // or empty: 1
  std::vector<float> lse_gradients;      // or empty: 0
  std::vector<float> entropy_gradients;  // or empty: there are none
  std::vector<float> shares;             // or empty: all count in dW
  std::vector<int32_t> by_label;         // within each tile
  KeptRows kept;
  TargetRows targets;
};

// The rows of these parts whose labels are not ignore_index and, unless something is wanted of them that has
// no weight, that have a factor which is not 0; by_label is left empty. Rows whose lists of kept tokens have
// `long_list` tokens or more come behind the others; apart from that they keep their order.
BatchRows SelectValidRows(std::span<const LabelledRows> parts,
                          int64_t long_list = std::numeric_limits<int64_t>::max());

// Fills by_label for tiles of `tile_rows` rows; or for one tile.
void OrderByLabel(int64_t tile_rows, BatchRows* batch);
void OrderByLabel(int64_t first_row, int64_t rows, BatchRows* batch);

// Fills by_token and token_starts for `tiles`, which the rows of the batch are cut into, the long ones last,
// and keeps these.
void OrderByToken(int64_t vocab, std::vector<KeptTile> tiles, KeptRows* kept);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_BATCH_ROWS_H_
