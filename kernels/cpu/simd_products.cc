#include "kernels/cpu/simd_products.h"

#include <algorithm>
#include <cstring>

namespace lossd::kernels::cpu {
namespace {

// Rows of the left operand that stay in the second-level cache while one panel of the right one stays in the
// first.
constexpr int64_t kCachedRows = 120;
constexpr int64_t kMaxTileFloats = kRowAlignment * kColumnAlignment;
// Steps of a logit's sum that are added up before they join the rest. Logits are the one product whose
// rounding errors are seen undiminished, in the loss: short chains make them smaller than those of a plain
// product.
constexpr int64_t kLogitDepth = 64;

// A register tile of which only [rows, columns] lie inside the output.
void MultiplyEdge(const SimdKernels& kernels, int64_t depth, const float* a, const float* b, float* c,
                  int64_t c_stride, int64_t rows, int64_t columns, Store store) {
  float tile[kMaxTileFloats];
  kernels.multiply_panels(depth, a, b, tile, kernels.tile_columns, Store::kOverwrite);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const float value = tile[i * kernels.tile_columns + j];
      float& out = c[i * c_stride + j];
      out = store == Store::kAdd ? out + value : value;
    }
  }
}

}  // namespace

void SimdProducts::PackRows(int64_t row, int64_t count, int64_t column, int64_t depth, const float* x,
                            int64_t stride) {
  kernels_.pack_transposed(DataType::kFloat32, x, stride, count, depth, kernels_.tile_rows,
                           PackedRow(row) + column * kernels_.tile_rows);
}

void SimdProducts::UnpackRow(int64_t row, int64_t column, int64_t count, float* x) const {
  const float* from = PackedRow(row) + column * kernels_.tile_rows;
  for (int64_t i = 0; i < count; ++i) x[i] = from[i * kernels_.tile_rows];
}

void SimdProducts::StoreExponentials(int64_t /*block*/, Range /*rows*/, const float* /*exponentials*/) {
  // MultiplyLogits writes to where E belongs.
}

void SimdProducts::ZeroExponentials(int64_t row) {
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    std::memset(Exponentials(block, row), 0, kBlock * sizeof(float));
  }
}

float* SimdProducts::StoredExponentials(int64_t block, Range rows) { return Exponentials(block, rows.begin); }

const float* SimdProducts::ReadExponentials(int64_t block, int64_t row, float* /*scratch*/) const {
  return Exponentials(block, row);
}

bool SimdProducts::MultiplyLogit(int64_t row, int64_t entry, float* scratch, float* logit) {
  const int64_t in_panel = row % kernels_.tile_rows;
  float tile[kRowAlignment * kBlock];
  for (int64_t k = 0; k < weight_.hidden; k += kBlock) {
    const int64_t depth = std::min(kBlock, weight_.hidden - k);
    kernels_.pack_transposed(weight_.type, weight_.At(entry, k), weight_.hidden, 1, depth,
                             kernels_.tile_columns, scratch);
    MultiplyLogitTile(k, depth, PackedRow(row - in_panel) + k * kernels_.tile_rows, scratch, tile);
  }
  *logit = tile[in_panel * kBlock];
  return true;
}

float* SimdProducts::MultiplyLogits(int64_t block, Range rows, float* scratch) {
  const int64_t first = block * kBlock;
  const int64_t columns = std::min(kBlock, weight_.vocab - first);
  for (int64_t k = 0; k < weight_.hidden; k += kBlock) {
    const int64_t depth = std::min(kBlock, weight_.hidden - k);
    for (int64_t j = 0; j < columns; j += kernels_.tile_columns) {
      kernels_.pack_transposed(weight_.type, weight_.At(first + j, k), weight_.hidden,
                               std::min(kernels_.tile_columns, columns - j), depth, kernels_.tile_columns,
                               scratch + j * depth);
    }
    for (int64_t cached = rows.begin; cached < rows.end; cached += kCachedRows) {
      const int64_t cached_end = std::min(cached + kCachedRows, rows.end);
      for (int64_t j = 0; j < columns; j += kernels_.tile_columns) {
        for (int64_t r = cached; r < cached_end; r += kernels_.tile_rows) {
          MultiplyLogitTile(k, depth, PackedRow(r) + k * kernels_.tile_rows, scratch + j * depth,
                            Exponentials(block, r) + j);
        }
      }
    }
  }
  return Exponentials(block, rows.begin);
}

// One register tile and up to kBlock steps of the reduction, the first of which is step `k`.
void SimdProducts::MultiplyLogitTile(int64_t k, int64_t depth, const float* a, const float* b,
                                     float* c) const {
  for (int64_t step = 0; step < depth; step += kLogitDepth) {
    kernels_.multiply_panels(std::min(kLogitDepth, depth - step), a + step * kernels_.tile_rows,
                             b + step * kernels_.tile_columns, c, kBlock,
                             k + step == 0 ? Store::kOverwrite : Store::kAdd);
  }
}

bool SimdProducts::MultiplyInputGradient(Range rows, Range columns, float* scratch) {
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    const int64_t first = block * kBlock;
    const int64_t depth = std::min(kBlock, weight_.vocab - first);
    for (int64_t j = columns.begin; j < columns.end; j += kernels_.tile_columns) {
      kernels_.pack(weight_.type, weight_.At(first, j), weight_.hidden, depth,
                    std::min(kernels_.tile_columns, columns.end - j), kernels_.tile_columns,
                    scratch + (j - columns.begin) * depth);
    }
    const Store store = block == 0 ? Store::kOverwrite : Store::kAdd;
    for (int64_t cached = rows.begin; cached < rows.end; cached += kCachedRows) {
      const int64_t cached_end = std::min(cached + kCachedRows, rows.end);
      for (int64_t j = columns.begin; j < columns.end; j += kernels_.tile_columns) {
        for (int64_t r = cached; r < cached_end; r += kernels_.tile_rows) {
          kernels_.multiply_rows(depth, Exponentials(block, r), kBlock, scratch + (j - columns.begin) * depth,
                                 tile_.dx + r * tile_.padded_hidden + j, tile_.padded_hidden, store);
        }
      }
    }
  }
  return true;
}

void SimdProducts::PackScaledRows(int64_t row_block, float* /*scratch*/) {
  const int64_t width = kernels_.tile_columns;
  const int64_t first = row_block * kBlock;
  const int64_t depth = std::min(kBlock, tile_.rows - first);
  float* to = tile_.dx + first * tile_.padded_hidden;
  for (int64_t k = 0; k < depth; ++k) {
    const float scale = tile_.row_states[first + k].scale;
    const float* x = PackedRow(first + k);
    // X of a row that overflowed may itself be infinite in the weight's type.
    const int64_t hidden = tile_.row_states[first + k].overflowed ? 0 : weight_.hidden;
    for (int64_t h = 0; h < tile_.padded_hidden; ++h) {
      float* panel = to + h / width * width * depth;
      panel[k * width + h % width] = h < hidden ? scale * x[h * kernels_.tile_rows] : 0.0f;
    }
  }
}

bool SimdProducts::MultiplyWeightGradient(int64_t block, Range columns, Store store, float* dw,
                                          float* scratch) {
  const int64_t first = block * kBlock;
  const int64_t block_rows = std::min(kBlock, weight_.vocab - first);
  for (int64_t k = 0; k < tile_.rows; k += kBlock) {
    const int64_t depth = std::min(kBlock, tile_.rows - k);
    for (int64_t i = 0; i < block_rows; i += kernels_.tile_rows) {
      kernels_.pack(DataType::kFloat32, Exponentials(block, k) + i, kBlock, depth,
                    std::min(kernels_.tile_rows, block_rows - i), kernels_.tile_rows, scratch + i * depth);
    }
    const Store block_store = k == 0 ? store : Store::kAdd;
    const float* scaled_rows = tile_.dx + k * tile_.padded_hidden;
    for (int64_t j = columns.begin; j < columns.end; j += kernels_.tile_columns) {
      const int64_t tile_columns = std::min(kernels_.tile_columns, columns.end - j);
      for (int64_t i = 0; i < block_rows; i += kernels_.tile_rows) {
        const int64_t tile_rows = std::min(kernels_.tile_rows, block_rows - i);
        float* out = dw + (first + i) * weight_.hidden + j;
        if (tile_rows == kernels_.tile_rows && tile_columns == kernels_.tile_columns) {
          kernels_.multiply_panels(depth, scratch + i * depth, scaled_rows + j * depth, out, weight_.hidden,
                                   block_store);
        } else {
          MultiplyEdge(kernels_, depth, scratch + i * depth, scaled_rows + j * depth, out, weight_.hidden,
                       tile_rows, tile_columns, block_store);
        }
      }
    }
  }
  return true;
}

}  // namespace lossd::kernels::cpu
