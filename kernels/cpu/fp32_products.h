// The three matrix products of the step in fp32 arithmetic, over the blocks of a Workspace. bf16 weights are
// widened block by block while they are packed, which is exact.
//
// Each works on a part of its output, so that callers spread parts over threads; no element's value depends
// on how the output was divided. Reductions run in blocks of kBlock: fused multiply-adds inside, then one
// addition.
#ifndef LOSSD_KERNELS_CPU_FP32_PRODUCTS_H_
#define LOSSD_KERNELS_CPU_FP32_PRODUCTS_H_

#include <cstdint>

#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/workspace.h"

namespace lossd::kernels::cpu {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

struct WeightMatrix {
  DataType type = DataType::kFloat32;
  const void* data = nullptr;  // [vocab, hidden]
  int64_t vocab = 0;
  int64_t hidden = 0;

  const void* At(int64_t row, int64_t column) const {
    return static_cast<const char*>(data) + (row * hidden + column) * SizeOf(type);
  }
};

// exponentials[block][rows] = X Wᵀ. `rows` begins at a multiple of kRowAlignment and ends at one.
void MultiplyLogits(const SimdKernels& kernels, const WeightMatrix& weight, const Workspace& workspace,
                    int64_t block, Range rows, float* scratch);

// dx[rows][columns] = E W. `rows` as above, columns.begin a multiple of kColumnAlignment, at most kBlock
// columns.
void MultiplyInputGradient(const SimdKernels& kernels, const WeightMatrix& weight, const Workspace& workspace,
                           Range rows, Range columns, float* scratch);

// dw[block's rows][columns] = or += Eᵀ xs, with xs = v X as PackScaledRows left it. columns.begin is a
// multiple of kColumnAlignment.
void MultiplyWeightGradient(const SimdKernels& kernels, const WeightMatrix& weight,
                            const Workspace& workspace, int64_t block, Range columns, Store store, float* dw,
                            float* scratch);

// Writes v X into workspace.dx as the right operand of MultiplyWeightGradient, for one kBlock of rows.
void PackScaledRows(const SimdKernels& kernels, int64_t hidden, const Workspace& workspace,
                    int64_t row_block);

// Element `column` of row `row` of the packed X, in steps of tile_rows from one column to the next.
inline const float* PackedRow(const SimdKernels& kernels, const Workspace& workspace, int64_t hidden,
                              int64_t row) {
  const int64_t in_panel = row % kernels.tile_rows;
  return workspace.x + (row - in_panel) * hidden + in_panel;
}

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_FP32_PRODUCTS_H_
