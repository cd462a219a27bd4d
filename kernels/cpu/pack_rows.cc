#include "kernels/cpu/pack_rows.h"

#include <algorithm>
#include <bit>

#include "kernels/cpu/parallel.h"

namespace lossd::kernels::cpu {
namespace {

// Through the bits, which order like the magnitudes: compilers vectorise that. NaN counts as largest.
float LargestMagnitude(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7FFFFFFFU);
  }
  return std::bit_cast<float>(largest);
}

}  // namespace

void PackRows(const HiddenStates& x, DataType weight_type, const Workspace& tile, Products& products,
              int64_t threads) {
  constexpr int64_t kDepth = 2048;
  const int64_t panel_rows = products.rows_per_panel();
  ParallelFor(threads, CeilDivide(tile.padded_rows, panel_rows), [&](int64_t panel, int64_t thread) {
    float* wide = tile.Scratch(thread);
    float* narrow = wide + kRowAlignment * kDepth;
    const int64_t first = panel * panel_rows;
    const int64_t rows = std::clamp<int64_t>(tile.rows - first, 0, panel_rows);
    for (int64_t column = 0; column < x.hidden; column += kDepth) {
      const int64_t depth = std::min(kDepth, x.hidden - column);
      for (int64_t i = 0; i < rows; ++i) {
        RowState& row = tile.row_states[first + i];
        const int64_t element = row.index * x.hidden + column;
        const char* from = static_cast<const char*>(x.data) + element * SizeOf(x.type);
        Convert(x.type, from, weight_type, narrow, depth);
        Convert(weight_type, narrow, DataType::kFloat32, wide + i * kDepth, depth);
        row.largest = std::max(row.largest, LargestMagnitude(wide + i * kDepth, depth));
      }
      products.PackRows(first, rows, column, depth, wide, kDepth);
    }
  });
}

}  // namespace lossd::kernels::cpu
