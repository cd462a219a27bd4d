// The fused step on one tile of rows (docs/numerics.md has the formulas). Each segment of the vocabulary by
// itself, one after the other:
//
//   1. logits by blocks of the vocabulary, each turned at once into E = e^(s - offset) 2^-exponent
//   (LogitRows), with row sums in fp64. The row's exponent comes from its first block.
//   2. rows whose sum came out of range are done again with the true maximum as offset.
//
// Over all segments, and all ranks:
//
//   3. rows are merged (row_sums.h), which gives losses, and the factors of a row's gradient: one for E in
//   each segment, one for the label, whose own E was taken out of the tile (RowFinish). With label smoothing
//   or soft targets the gradient is then formed element by element where E was. Soft targets: the logits of
//   both heads are kept as they were multiplied, and looked at row by row before the losses (SoftTargets).
//   4. dX = sum of scale E W + target_gradient W_y (InputGradient).
//
// Each segment by itself again:
//
//   5. dW += Eᵀ (scale X), then dW_y += target_gradient x.
//   6. db += Eᵀ scale, db_y += target_gradient.
#ifndef LOSSD_KERNELS_CPU_TILE_STEP_H_
#define LOSSD_KERNELS_CPU_TILE_STEP_H_

#include <cstdint>
#include <span>

#include "kernels/cpu/row_finish.h"
#include "kernels/cpu/segments/row_sums.h"
#include "kernels/cpu/segments/segment.h"
#include "kernels/cpu/segments/shard_exchange.h"
#include "kernels/cpu/segments/soft_sums.h"
#include "kernels/cpu/segments/vocabulary.h"
#include "kernels/cpu/tile_memory.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/segment_tree.h"

namespace lossd::kernels::cpu {

// Methods are called once each, in the order they are declared in. They return kInternal if the math library
// failed, kRankLost if the communicator did.
class TileStep {
 public:
  // The segments' steps are bound to `memory`, whose row states hold index and label. All references outlive
  // the step.
  TileStep(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary, std::span<Segment> segments,
           const RowFinish& finish, const ShardExchange& exchange, const TileMemory& memory);

  // Writes losses and returns. Returns through `rows_redone` how many rows took step 2 in any segment.
  Status ComputeLosses(int64_t* rows_redone);
  // Writes dX.
  Status ComputeInputGradient();
  Status ComputeWeightGradient(Store store);
  void ComputeBiasGradient(Store store);

 private:
  Status PackHiddenStates();
  Status FindLabelLogits();
  Status SummariseSoftTargets();
  void SumTargetLists() const;
  void SummariseSoftTargets(SoftPass pass, int64_t r, PerSegment<SoftSums>* sums) const;
  Status GatherSums();
  Status GatherTop();
  PerSegment<RowSums> SumsOf(int64_t r) const;
  void FindTop(int64_t r, TopEntry* top) const;
  bool FinishRow(int64_t r);
  int64_t Label(int64_t r) const { return segments_[0].first() + tile_.row_states[r].label; }
  size_t segments() const { return static_cast<size_t>(vocabulary_.segments()); }

  const LinearCrossEntropyParams& params_;
  const Vocabulary& vocabulary_;
  const std::span<Segment> segments_;  // this rank's
  const RowFinish& finish_;
  const ShardExchange& exchange_;
  const TileMemory& memory_;
  const Workspace& tile_;  // of the first segment
  const int32_t kept_;     // largest logits of a row
  const int64_t threads_;
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_TILE_STEP_H_
