// Products in fp32 through SimdKernels. Weights of 16 bits are widened block by block while they are packed,
// which is exact.
//
// Reductions run in short blocks: a chain of fused multiply-adds inside each, then one addition to the
// result. That order is the same for every element.
#ifndef LOSSD_KERNELS_CPU_SIMD_PRODUCTS_H_
#define LOSSD_KERNELS_CPU_SIMD_PRODUCTS_H_

#include "kernels/cpu/products.h"

namespace lossd::kernels::cpu {

class SimdProducts final : public Products {
 public:
  SimdProducts(const SimdKernels& kernels, const WeightMatrix& weight, const Workspace& tile)
      : Products(weight, tile), kernels_(kernels) {}

  int64_t rows_per_panel() const override { return kernels_.tile_rows; }
  int64_t logit_rows() const override { return tile_.padded_rows; }
  void PackRows(int64_t row, int64_t count, int64_t column, int64_t depth, const float* x,
                int64_t stride) override;
  void UnpackRow(int64_t row, int64_t column, int64_t count, float* x) const override;
  float* MultiplyLogits(int64_t block, Range rows, float* scratch) override;
  void StoreExponentials(int64_t block, Range rows, const float* exponentials) override;
  void ZeroExponentials(int64_t row) override;
  float* StoredExponentials(int64_t block, Range rows) override;
  const float* ReadExponentials(int64_t block, int64_t row, float* scratch) const override;
  bool MultiplyLogit(int64_t row, int64_t entry, float* scratch, float* logit) override;
  bool MultiplyInputGradient(Range rows, Range columns, float* scratch) override;
  void PackScaledRows(int64_t row_block, float* scratch) override;
  bool MultiplyWeightGradient(int64_t block, Range columns, Store store, float* dw, float* scratch) override;

 private:
  void MultiplyLogitTile(int64_t k, int64_t depth, const float* a, const float* b, float* c) const;
  float* Exponentials(int64_t block, int64_t row) const {
    return static_cast<float*>(tile_.exponentials) + tile_.ExponentialsIndex(block, row);
  }
  // X lies in panels of tile_rows rows: element `column` of a row is tile_rows floats from its neighbours.
  float* PackedRow(int64_t row) const {
    const int64_t in_panel = row % kernels_.tile_rows;
    return static_cast<float*>(tile_.x) + (row - in_panel) * weight_.hidden + in_panel;
  }

  const SimdKernels& kernels_;
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SIMD_PRODUCTS_H_
