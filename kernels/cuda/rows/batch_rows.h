// The valid rows of a batch as the step wants them. Host memory only.
#ifndef LOSSD_KERNELS_CUDA_ROWS_BATCH_ROWS_H_
#define LOSSD_KERNELS_CUDA_ROWS_BATCH_ROWS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

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
  // Whether anything is wanted of rows that is not 0 where all their factors are (RowReturns::unweighted).
  bool wants_unweighted = false;
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
};

// The rows of these parts whose labels are not ignore_index and, unless something is wanted of them that has
// no weight, that have a factor which is not 0; by_label is left empty.
BatchRows SelectValidRows(std::span<const LabelledRows> parts);

// Fills by_label for tiles of `tile_rows` rows.
void OrderByLabel(int64_t tile_rows, BatchRows* batch);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_BATCH_ROWS_H_
