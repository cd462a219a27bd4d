#include "kernels/cpu/fp32_products.h"

#include <algorithm>

namespace lossd::kernels::cpu {
namespace {

// Rows of the left operand that stay in the second-level cache while one panel of the right one stays in the
// first.
constexpr int64_t kCachedRows = 120;
constexpr int64_t kMaxTileFloats = 12 * 32;

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

void MultiplyLogits(const SimdKernels& kernels, const WeightMatrix& weight, const Workspace& workspace,
                    int64_t block, Range rows, float* scratch) {
  const int64_t first = block * kBlock;
  const int64_t columns = std::min(kBlock, weight.vocab - first);
  for (int64_t k = 0; k < weight.hidden; k += kBlock) {
    const int64_t depth = std::min(kBlock, weight.hidden - k);
    for (int64_t j = 0; j < columns; j += kernels.tile_columns) {
      kernels.pack_transposed(weight.type, weight.At(first + j, k), weight.hidden,
                              std::min(kernels.tile_columns, columns - j), depth, kernels.tile_columns,
                              scratch + j * depth);
    }
    const Store store = k == 0 ? Store::kOverwrite : Store::kAdd;
    for (int64_t cached = rows.begin; cached < rows.end; cached += kCachedRows) {
      const int64_t cached_end = std::min(cached + kCachedRows, rows.end);
      for (int64_t j = 0; j < columns; j += kernels.tile_columns) {
        for (int64_t r = cached; r < cached_end; r += kernels.tile_rows) {
          kernels.multiply_panels(depth, workspace.x + r * weight.hidden + k * kernels.tile_rows,
                                  scratch + j * depth, workspace.Exponentials(block, r) + j, kBlock, store);
        }
      }
    }
  }
}

void MultiplyInputGradient(const SimdKernels& kernels, const WeightMatrix& weight, const Workspace& workspace,
                           Range rows, Range columns, float* scratch) {
  for (int64_t block = 0; block < workspace.blocks; ++block) {
    const int64_t first = block * kBlock;
    const int64_t depth = std::min(kBlock, weight.vocab - first);
    for (int64_t j = columns.begin; j < columns.end; j += kernels.tile_columns) {
      kernels.pack(weight.type, weight.At(first, j), weight.hidden, depth,
                   std::min(kernels.tile_columns, columns.end - j), kernels.tile_columns,
                   scratch + (j - columns.begin) * depth);
    }
    const Store store = block == 0 ? Store::kOverwrite : Store::kAdd;
    for (int64_t cached = rows.begin; cached < rows.end; cached += kCachedRows) {
      const int64_t cached_end = std::min(cached + kCachedRows, rows.end);
      for (int64_t j = columns.begin; j < columns.end; j += kernels.tile_columns) {
        for (int64_t r = cached; r < cached_end; r += kernels.tile_rows) {
          kernels.multiply_rows(
              depth, workspace.Exponentials(block, r), kBlock, scratch + (j - columns.begin) * depth,
              workspace.dx + r * workspace.padded_hidden + j, workspace.padded_hidden, store);
        }
      }
    }
  }
}

void PackScaledRows(const SimdKernels& kernels, int64_t hidden, const Workspace& workspace,
                    int64_t row_block) {
  const int64_t width = kernels.tile_columns;
  const int64_t first = row_block * kBlock;
  const int64_t depth = std::min(kBlock, workspace.rows - first);
  float* to = workspace.dx + first * workspace.padded_hidden;
  for (int64_t k = 0; k < depth; ++k) {
    const float scale = workspace.row_states[first + k].scale;
    const float* x = PackedRow(kernels, workspace, hidden, first + k);
    for (int64_t h = 0; h < workspace.padded_hidden; ++h) {
      float* panel = to + h / width * width * depth;
      panel[k * width + h % width] = h < hidden ? scale * x[h * kernels.tile_rows] : 0.0f;
    }
  }
}

void MultiplyWeightGradient(const SimdKernels& kernels, const WeightMatrix& weight,
                            const Workspace& workspace, int64_t block, Range columns, Store store, float* dw,
                            float* scratch) {
  const int64_t first = block * kBlock;
  const int64_t block_rows = std::min(kBlock, weight.vocab - first);
  for (int64_t k = 0; k < workspace.rows; k += kBlock) {
    const int64_t depth = std::min(kBlock, workspace.rows - k);
    for (int64_t i = 0; i < block_rows; i += kernels.tile_rows) {
      kernels.pack(DataType::kFloat32, workspace.Exponentials(block, k) + i, kBlock, depth,
                   std::min(kernels.tile_rows, block_rows - i), kernels.tile_rows, scratch + i * depth);
    }
    const Store block_store = k == 0 ? store : Store::kAdd;
    const float* scaled_rows = workspace.dx + k * workspace.padded_hidden;
    for (int64_t j = columns.begin; j < columns.end; j += kernels.tile_columns) {
      const int64_t tile_columns = std::min(kernels.tile_columns, columns.end - j);
      for (int64_t i = 0; i < block_rows; i += kernels.tile_rows) {
        const int64_t tile_rows = std::min(kernels.tile_rows, block_rows - i);
        float* out = dw + (first + i) * weight.hidden + j;
        if (tile_rows == kernels.tile_rows && tile_columns == kernels.tile_columns) {
          kernels.multiply_panels(depth, scratch + i * depth, scaled_rows + j * depth, out, weight.hidden,
                                  block_store);
        } else {
          MultiplyEdge(kernels, depth, scratch + i * depth, scaled_rows + j * depth, out, weight.hidden,
                       tile_rows, tile_columns, block_store);
        }
      }
    }
  }
}

}  // namespace lossd::kernels::cpu
