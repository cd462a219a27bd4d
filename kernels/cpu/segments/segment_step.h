// One segment's part of the fused step on one tile of rows. TileStep has the whole, and docs/numerics.md the
// formulas.
#ifndef LOSSD_KERNELS_CPU_SEGMENTS_SEGMENT_STEP_H_
#define LOSSD_KERNELS_CPU_SEGMENTS_SEGMENT_STEP_H_

#include <atomic>
#include <cstdint>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/logit_rows.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/row_finish.h"
#include "kernels/cpu/segments/row_sums.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/soft_targets.h"
#include "kernels/cpu/workspace.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

// The records that a tile must keep for this batch.
RowRecord RecordFor(const LinearCrossEntropyParams& params);

// The form of gradients in the tile.
GradientForm FormFor(const LinearCrossEntropyParams& params, Arithmetic arithmetic);

// The parameters are the segment's own: its entries are a vocabulary that begins at 0. Steps of segments
// share hidden states and scratch, so they are not at work at once. Methods that return bool return false if
// the math library failed.
class SegmentStep {
 public:
  // `tile` is laid out, with the record that RecordFor says, and its row states hold index and label. `soft`:
  // of params.teacher, null without one. All references outlive the step.
  SegmentStep(const LinearCrossEntropyParams& params, const SimdKernels& kernels, const WeightMatrix& weight,
              const Workspace& tile, Products& products, GradientForm form, const SoftTargets* soft);

  const Workspace& tile() const { return tile_; }
  bool HasLabel(int64_t r) const {
    return tile_.row_states[r].label >= 0 && tile_.row_states[r].label < params_.vocab;
  }

  // Stores X of the tile, for all segments, and the largest magnitudes in this one's row states.
  void PackHiddenStates();
  // Fills in the label's logit in the details of rows whose label is one of the segment's. A logit's rank can
  // only be counted when it is known, so all segments need it before their sums.
  bool FindLabelLogits();
  // Turns logits into exponentials, with their sums.
  bool ComputeSums();
  RowSums Sums(int64_t r) const;
  // `sum`: of the whole row, in this segment's units.
  void SetFactors(int64_t r, const RowFactors& factors, double sum);
  // Forms gradients element by element, where the form says so.
  bool FormGradients();

  // dX's part: first E W of all rows, then scaled, with the label's, row by row.
  bool MultiplyInputGradient();
  void ScaleInputGradient(int64_t r, float* scratch) const;

  bool ComputeWeightGradient(Store store);
  void ComputeBiasGradient(Store store);

 private:
  int64_t RowsPerTask(int64_t tasks_per_row_range) const;
  Range RowRange(int64_t index, int64_t size) const;
  void ProcessBlocks(Range blocks, Range rows, int64_t rows_per_task, Pass pass);
  void ProcessBlock(int64_t block, Range rows, Pass pass, float* scratch);
  float* Values(int64_t block, Range rows, Pass pass, float* scratch);
  float* KeptValues(int64_t block, Range rows, float* scratch);
  bool Stores(Pass pass) const;
  void SumRows(Range rows);
  void RedoRowsOutOfRange();
  void UseTrueMaximum(int64_t r);
  void AddMoments(int64_t r, RowSums* sums) const;
  void AddTargets();
  void SumGradients(int64_t block, float* scratch, double* sums) const;

  const LinearCrossEntropyParams& params_;
  const WeightMatrix& weight_;
  const Workspace& tile_;
  Products& products_;
  const SoftTargets* const soft_;
  const GradientForm form_;
  const LogitRows logit_rows_;
  const int64_t threads_;
  std::atomic<bool> failed_ = false;  // set by any thread
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SEGMENTS_SEGMENT_STEP_H_
