// The CPU step over a whole batch: valid rows are gathered into tiles that fit the workspace; TileStep does
// the work.
#include "kernels/linear_cross_entropy.h"

#include <cstring>
#include <span>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/gathered/kept_tokens.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/row_finish.h"
#include "kernels/cpu/segments/segment.h"
#include "kernels/cpu/segments/segment_step.h"
#include "kernels/cpu/segments/shard_exchange.h"
#include "kernels/cpu/segments/vocabulary.h"
#include "kernels/cpu/tile_memory.h"
#include "kernels/cpu/tile_step.h"
#include "kernels/validate.h"

namespace lossd::kernels {
namespace cpu {
namespace {

class BatchStep {
 public:
  BatchStep(const LinearCrossEntropyParams& params, Arithmetic arithmetic, LinearCrossEntropyStats* stats)
      : params_(params),
        arithmetic_(arithmetic),
        stats_(*stats),
        vocabulary_(params.shard, params.vocab),
        exchange_(vocabulary_),
        segments_(params, vocabulary_),
        finish_(params, vocabulary_, BestSimdKernels(), FormFor(params, arithmetic),
                SumOfClassWeights(params, vocabulary_)) {
    if (params.teacher != nullptr) teacher_ = {params.teacher->hidden, params.teacher->weight_type};
  }

  Status Run() {
    int64_t next = NextValid(0);
    tile_ = TileWithin(params_.workspace_bytes);
    int64_t tile_rows = tile_.rows;
    if (next < params_.tokens) {
      if (const Status status = exchange_.AgreeOnRows(&tile_rows); status != Status::kOk) return status;
    }
    if (tile_rows == 0) return Status::kWorkspaceTooSmall;
    if (vocabulary_.answers()) ClearDroppedRows(params_);
    if (next == params_.tokens) FinishWithoutRows();
    Store store = params_.weight_gradient == WeightGradient::kOverwrite ? Store::kOverwrite : Store::kAdd;
    while (next < params_.tokens) {
      next = TakeRows(next, tile_rows);
      const Status status = ProcessTile(store, next == params_.tokens);
      if (status == Status::kInternal) exchange_.GiveUp();
      if (status != Status::kOk) return status;
      store = Store::kAdd;
    }
    return Status::kOk;
  }

 private:
  TileSize TileWithin(int64_t bytes) const {
    const Shard& shard = vocabulary_.shard();
    TileSize size{1, params_.hidden, arithmetic_, RowRecord::kFull,
                  params_.teacher == nullptr ? nullptr : &teacher_};
    // Whether the workspace is large enough does not depend on the options.
    if (bytes < WorkspaceBytes(size, shard)) return {.rows = 0};
    size.record = RecordFor(params_);
    return LargestTile(bytes, size, shard);
  }

  int64_t NextValid(int64_t row) const {
    while (row < params_.tokens && IsDropped(params_, row)) ++row;
    return row;
  }

  void FinishWithoutRows() {
    NotifyInputGradients();
    if (params_.weight_gradient != WeightGradient::kOverwrite) return;
    std::memset(params_.dw, 0, static_cast<size_t>(params_.vocab * params_.hidden) * sizeof(float));
    ClearBiasGradient();
  }

  void ClearBiasGradient() const {
    if (params_.db == nullptr) return;
    std::memset(params_.db, 0, static_cast<size_t>(params_.vocab) * sizeof(float));
  }

  void NotifyInputGradients() const {
    if (params_.on_input_gradients != nullptr) params_.on_input_gradients(params_.on_input_gradients_context);
  }

  // Puts the next valid rows, at most `limit`, into the tile. `row` is valid; returns the first valid row
  // that was not taken, or the number of rows.
  int64_t TakeRows(int64_t row, int64_t limit) {
    int64_t count = 0;
    for (int64_t r = row; r < params_.tokens && count < limit; ++r) count += !IsDropped(params_, r);
    TileSize size = tile_;
    size.rows = count;
    LayOut(size, segments_.entries(), {exchange_.is_alone() ? 0 : vocabulary_.segments()}, params_.workspace,
           &memory_);
    for (int64_t i = 0; i < count; ++i) {
      for (size_t s = 0; s < segments_.all().size(); ++s) PutRow(row, i, s);
      row = NextValid(row + 1);
    }
    stats_.valid_tokens += count;
    return row;
  }

  // Row `row` of the batch is row `r` of the tile.
  void PutRow(int64_t row, int64_t r, size_t segment) {
    const Workspace& tile = memory_.segments[segment];
    const int64_t label = params_.labels[row] - segments_.all()[segment].first();
    tile.row_states[r] = RowState{.index = row, .label = label};
    if (tile.row_details != nullptr) tile.row_details[r] = RowDetail{};
    if (params_.teacher != nullptr) memory_.soft[segment].teacher.row_states[r] = {.index = row};
  }

  Status ProcessTile(Store store, bool is_last) {
    const std::span<Segment> segments = segments_.all();
    for (size_t i = 0; i < segments.size(); ++i) {
      segments[i].BindStep(arithmetic_, memory_.segments[i], memory_.soft[i]);
    }
    TileStep step(params_, vocabulary_, segments, finish_, exchange_, memory_);
    int64_t rows_redone = 0;
    if (const Status status = step.ComputeLosses(&rows_redone); status != Status::kOk) return status;
    stats_.rows_redone += rows_redone;
    if (params_.dx != nullptr) {
      if (const Status status = step.ComputeInputGradient(); status != Status::kOk) return status;
    }
    if (is_last) NotifyInputGradients();
    if (params_.weight_gradient == WeightGradient::kNone) return Status::kOk;
    if (const Status status = step.ComputeWeightGradient(store); status != Status::kOk) return status;
    if (params_.bias != nullptr) {
      step.ComputeBiasGradient(store);
    } else if (store == Store::kOverwrite) {
      ClearBiasGradient();
    }
    return Status::kOk;
  }

  const LinearCrossEntropyParams& params_;
  const Arithmetic arithmetic_;
  LinearCrossEntropyStats& stats_;
  const Vocabulary vocabulary_;
  const ShardExchange exchange_;
  LocalSegments segments_;
  const RowFinish finish_;
  TeacherSize teacher_;  // with a teacher
  TileSize tile_;        // the largest
  TileMemory memory_;
};

}  // namespace

Arithmetic BestArithmetic(DataType weight_type) {
  return weight_type == DataType::kBFloat16 && HasFastBFloat16() ? Arithmetic::kLibraryBFloat16
                                                                 : Arithmetic::kSimd;
}

Status RunLinearCrossEntropy(const LinearCrossEntropyParams& params, Arithmetic arithmetic,
                             LinearCrossEntropyStats* stats) {
  LinearCrossEntropyStats unused;
  LinearCrossEntropyStats& result = stats == nullptr ? unused : *stats;
  result = {};
  if (const Status status = ValidateStep(params); status != Status::kOk) return status;
  if (params.kept_tokens.given()) return RunKeptTokens(params, &result);
  // The library takes the weights as they are stored.
  const DataType operand =
      arithmetic == Arithmetic::kLibraryBFloat16 ? DataType::kBFloat16 : DataType::kFloat32;
  if (arithmetic != Arithmetic::kSimd && params.weight_type != operand) return Status::kUnsupported;
  return BatchStep(params, arithmetic, &result).Run();
}

}  // namespace cpu

Status CpuLinearCrossEntropy(const LinearCrossEntropyParams& params, LinearCrossEntropyStats* stats) {
  return cpu::RunLinearCrossEntropy(params, cpu::BestArithmetic(params.weight_type), stats);
}

}  // namespace lossd::kernels
