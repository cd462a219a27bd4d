// The fused step on one tile of rows (docs/numerics.md has the formulas):
//
//   1. logits by blocks of the vocabulary, each turned at once into E = e^(s - offset) 2^-exponent
//   (LogitRows),
//      with row sums in fp64. The row's exponent comes from its first block.
//   2. rows whose sum came out of range are done again with the true maximum as offset.
//   3. losses, and the two factors of a row's gradient: one for E, one for the label, whose own E was taken
//      out of the tile (RowFinish). With label smoothing or soft targets the gradient is then formed element
//      by element where E was.
//      Soft targets: the logits of both heads are kept as they were multiplied, and looked at row by row
//      before the losses (SoftTargets).
//   4. dX = scale E W + target_gradient W_y.
//   5. dW += Eᵀ (scale X), then dW_y += target_gradient x.
//   6. db += Eᵀ scale, db_y += target_gradient.
#ifndef LOSSD_KERNELS_CPU_TILE_STEP_H_
#define LOSSD_KERNELS_CPU_TILE_STEP_H_

#include <atomic>
#include <cstdint>

#include "kernels/cpu/logit_rows.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/row_finish.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/soft_targets.h"
#include "kernels/cpu/workspace.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

// The records that a tile must keep for this batch.
RowRecord RecordFor(const LinearCrossEntropyParams& params);

// Methods are called once each, in the order they are declared in. They return false if the math library
// failed.
class TileStep {
 public:
  // `tile` is laid out, with the record that RecordFor says, and its row states hold index and label. All
  // references outlive the step.
  // `soft`: of params.teacher, null without one.
  TileStep(const LinearCrossEntropyParams& params, const SimdKernels& kernels, const WeightMatrix& weight,
           const Workspace& tile, Products& products, double class_weight_sum, const SoftTargets* soft);

  // Writes losses and returns. Returns through `rows_redone` how many rows took step 2.
  bool ComputeLosses(int64_t* rows_redone);
  // Writes dX.
  bool ComputeInputGradient();
  bool ComputeWeightGradient(Store store);
  void ComputeBiasGradient(Store store);

 private:
  int64_t RowsPerTask(int64_t tasks_per_row_range) const;
  Range RowRange(int64_t index, int64_t size) const;
  void FindLabelLogits();
  void ProcessBlocks(Range blocks, Range rows, int64_t rows_per_task, Pass pass);
  void ProcessBlock(int64_t block, Range rows, Pass pass, float* scratch);
  float* Values(int64_t block, Range rows, Pass pass, float* scratch);
  float* KeptValues(int64_t block, Range rows, float* scratch);
  bool Stores(Pass pass) const;
  void SumRows(Range rows);
  int64_t RedoRowsOutOfRange();
  void UseTrueMaximum(int64_t r);
  void WriteInputGradient(int64_t r, float* scratch);
  void AddTargets();
  void SumGradients(int64_t block, float* scratch, double* sums) const;

  const LinearCrossEntropyParams& params_;
  const WeightMatrix& weight_;
  const Workspace& tile_;
  Products& products_;
  const SoftTargets* const soft_;
  const GradientForm form_;
  const LogitRows logit_rows_;
  const RowFinish finish_;
  const int64_t threads_;
  std::atomic<bool> failed_ = false;  // set by any thread
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_TILE_STEP_H_
