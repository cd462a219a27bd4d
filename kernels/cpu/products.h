// The three matrix products of the step over the tile in a Workspace, and the layouts of their operands.
//
// Each call works on a part of its output, so that the caller spreads parts over threads; no element's value
// depends on how the output was divided, nor on how many rows the tile holds. A Products is bound to one
// tile: it holds no data of its own and may be used by several threads at once on parts that do not overlap.
#ifndef LOSSD_KERNELS_CPU_PRODUCTS_H_
#define LOSSD_KERNELS_CPU_PRODUCTS_H_

#include <cstdint>

#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/workspace.h"
#include "kernels/linear_cross_entropy.h"

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

class Products {
 public:
  Products(const WeightMatrix& weight, const Workspace& tile) : weight_(weight), tile_(tile) {}
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // Rows of X that PackRows takes at once, and rows of logits that MultiplyLogits makes at once.
  virtual int64_t rows_per_panel() const = 0;
  virtual int64_t logit_rows() const = 0;

  // Stores rows [row, row + count) of X, count <= rows_per_panel(). `x` is [count, hidden] with row stride
  // `stride`, columns [column, column + depth) only, already rounded to the weight's type.
  virtual void PackRows(int64_t row, int64_t count, int64_t column, int64_t depth, const float* x,
                        int64_t stride) = 0;
  // Copies a row of X back, columns [column, column + count).
  virtual void UnpackRow(int64_t row, int64_t column, int64_t count, float* x) const = 0;

  // Logits X Wᵀ of `rows` and one block of the vocabulary: [rows, tile.block_columns] with row stride
  // tile.block_columns, where the block ends early only its own columns. They may lie in `scratch` or in the
  // tile; nullptr if the product failed. The caller turns them into E in place and hands them to
  // StoreExponentials before the next call with this scratch.
  virtual float* MultiplyLogits(int64_t block, Range rows, float* scratch) = 0;
  virtual void StoreExponentials(int64_t block, Range rows, const float* exponentials) = 0;
  virtual void ZeroExponentials(int64_t row) = 0;
  // What MultiplyLogits gave and StoreExponentials kept, if it is still there in fp32 and may be changed in
  // place; nullptr otherwise.
  virtual float* StoredExponentials(int64_t block, Range rows) = 0;
  // What the product for dW takes of one row and block, widened to fp32: in the tile, or in `scratch`.
  virtual const float* ReadExponentials(int64_t block, int64_t row, float* scratch) const = 0;
  // The logit of one row and entry, with the bits it has among those of its block. False if the product
  // failed.
  virtual bool MultiplyLogit(int64_t row, int64_t entry, float* scratch, float* logit) = 0;

  // tile.dx[rows][columns] = E W. Ranges begin at multiples of kRowAlignment and kColumnAlignment; at most
  // kBlock columns.
  virtual bool MultiplyInputGradient(Range rows, Range columns, float* scratch) = 0;

  // Stores v X over tile.dx, for one kBlock of rows.
  virtual void PackScaledRows(int64_t row_block, float* scratch) = 0;
  // dw[rows of the block][columns] = or += Eᵀ (v X). columns.begin is a multiple of kColumnAlignment.
  virtual bool MultiplyWeightGradient(int64_t block, Range columns, Store store, float* dw,
                                      float* scratch) = 0;

 protected:
  ~Products() = default;

  const WeightMatrix& weight_;
  const Workspace& tile_;
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_PRODUCTS_H_
