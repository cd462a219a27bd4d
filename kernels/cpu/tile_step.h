// The fused step on one tile of rows (docs/numerics.md has the formulas):
//
//   1. logits by blocks of the vocabulary, each turned at once into E = e^(z - offset) 2^-exponent, with row
//   sums in fp64.
//      The row's exponent comes from its first block.
//   2. rows whose sum came out of range are done again with the true maximum as offset.
//   3. loss, and the two factors of the gradient: v = g / sum, and g (p_y - 1) for the label, whose own E was
//   taken out
//      of the tile.
//   4. dX = v E W + g (p_y - 1) W_y.
//   5. dW += Eᵀ (v X), then dW_y += g (p_y - 1) x.
#ifndef LOSSD_KERNELS_CPU_TILE_STEP_H_
#define LOSSD_KERNELS_CPU_TILE_STEP_H_

#include <atomic>
#include <cstdint>

#include "kernels/cpu/products.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/workspace.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

// Methods are called once each, in the order they are declared in. They return false if the math library
// failed.
class TileStep {
 public:
  // `tile` is laid out, and its row states hold index and label. All arguments outlive the step.
  TileStep(const LinearCrossEntropyParams& params, const SimdKernels& kernels, const WeightMatrix& weight,
           const Workspace& tile, Products& products);

  // Writes losses and log-sum-exps. Returns through `rows_redone` how many rows took step 2.
  bool ComputeLosses(int64_t* rows_redone);
  // Writes dX.
  bool ComputeInputGradient();
  bool ComputeWeightGradient(Store store);

 private:
  enum class Pass { kChooseExponentAndExponentiate, kExponentiate, kFindMaximum };

  int64_t RowsPerTask(int64_t tasks_per_row_range) const;
  Range RowRange(int64_t index, int64_t size) const;
  int64_t Columns(int64_t block) const;
  void PackRows();
  void ProcessBlocks(Range blocks, Range rows, int64_t rows_per_task, Pass pass);
  void ProcessBlock(int64_t block, Range rows, Pass pass, float* scratch);
  void ChooseExponent(const float* logits, int64_t columns, RowState& row) const;
  double Exponentiate(float* values, int64_t first, int64_t columns, RowState& row) const;
  void SumRows(Range rows);
  int64_t RedoRowsOutOfRange();
  void UseTrueMaximum(int64_t r);
  void FinishRow(int64_t r);
  bool GradientInRange(const RowState& row) const;
  void FinishOverflowedRow(int64_t r);
  void WriteInputGradient(int64_t r, float* scratch);
  void AddTargets();

  const LinearCrossEntropyParams& params_;
  const SimdKernels& kernels_;
  const WeightMatrix& weight_;
  const Workspace& tile_;
  Products& products_;
  const int64_t threads_;
  std::atomic<bool> failed_ = false;  // set by any thread
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_TILE_STEP_H_
