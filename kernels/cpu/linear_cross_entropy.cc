// The CPU step over a whole batch: valid rows are gathered into tiles that fit the workspace; TileStep does
// the work.
#include "kernels/linear_cross_entropy.h"

#include <cstring>
#include <optional>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/library_products.h"
#include "kernels/cpu/row_finish.h"
#include "kernels/cpu/simd_products.h"
#include "kernels/cpu/soft_targets.h"
#include "kernels/cpu/tile_step.h"
#include "kernels/cpu/workspace.h"
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
        record_(RecordFor(params)),
        class_weight_sum_(SumOfClassWeights(params)),
        weight_{params.weight_type, params.weight, params.vocab, params.hidden} {}

  Status Run() {
    const int64_t tile_rows = TileRows();
    if (tile_rows == 0) return Status::kWorkspaceTooSmall;
    ClearIgnoredRows();
    int64_t next = NextValid(0);
    if (next == params_.tokens) FinishWithoutRows();
    Store store = params_.weight_gradient == WeightGradient::kOverwrite ? Store::kOverwrite : Store::kAdd;
    while (next < params_.tokens) {
      next = TakeRows(next, tile_rows);
      if (!ProcessTile(store, next == params_.tokens)) return Status::kInternal;
      store = Store::kAdd;
    }
    return Status::kOk;
  }

 private:
  int64_t TileRows() const {
    const int64_t bytes = params_.workspace_bytes;
    if (params_.teacher != nullptr) {
      return RowsWithin(bytes, params_.vocab, params_.hidden, arithmetic_, teacher_size());
    }
    // Whether the workspace is large enough does not depend on the options.
    if (bytes < WorkspaceBytes(1, params_.vocab, params_.hidden, arithmetic_)) return 0;
    return RowsWithin(bytes, params_.vocab, params_.hidden, arithmetic_, record_);
  }
  TeacherSize teacher_size() const { return {params_.teacher->hidden, params_.teacher->weight_type}; }

  bool IsIgnored(int64_t row) const { return params_.labels[row] == params_.ignore_index; }

  int64_t NextValid(int64_t row) const {
    while (row < params_.tokens && IsIgnored(row)) ++row;
    return row;
  }

  void ClearIgnoredRows() {
    const int64_t dx_row_bytes = params_.hidden * SizeOf(params_.dx_type);
    for (int64_t r = 0; r < params_.tokens; ++r) {
      if (!IsIgnored(r)) continue;
      params_.losses[r] = 0.0f;
      FillReturns(params_.returns, r, 0.0f, -1);
      if (params_.dx == nullptr) continue;
      std::memset(static_cast<char*>(params_.dx) + r * dx_row_bytes, 0, static_cast<size_t>(dx_row_bytes));
    }
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
    for (int64_t r = row; r < params_.tokens && count < limit; ++r) count += !IsIgnored(r);
    if (params_.teacher == nullptr) {
      LayOut(count, params_.vocab, params_.hidden, arithmetic_, record_, params_.workspace, &tile_);
    } else {
      LayOut(count, params_.vocab, params_.hidden, arithmetic_, teacher_size(), params_.workspace, &tile_,
             &soft_tile_);
    }
    for (int64_t i = 0; i < count; ++i) {
      tile_.row_states[i] = RowState{.index = row, .label = params_.labels[row]};
      if (params_.teacher != nullptr) soft_tile_.teacher.row_states[i] = tile_.row_states[i];
      if (record_ == RowRecord::kFull) tile_.row_details[i] = RowDetail{};
      row = NextValid(row + 1);
    }
    stats_.valid_tokens += count;
    return row;
  }

  bool ProcessTile(Store store, bool is_last) {
    if (arithmetic_ == Arithmetic::kSimd) {
      SimdProducts products(BestSimdKernels(), weight_, tile_);
      return ProcessTileWith(products, store, is_last);
    }
    LibraryProducts products(weight_, tile_);
    return ProcessTileWith(products, store, is_last);
  }

  bool ProcessTileWith(Products& products, Store store, bool is_last) {
    std::optional<SoftTargets> soft;
    if (params_.teacher != nullptr) soft.emplace(params_, BestSimdKernels(), tile_, soft_tile_);
    TileStep step(params_, BestSimdKernels(), weight_, tile_, products, class_weight_sum_,
                  soft.has_value() ? &*soft : nullptr);
    int64_t rows_redone = 0;
    if (!step.ComputeLosses(&rows_redone)) return false;
    stats_.rows_redone += rows_redone;
    if (params_.dx != nullptr && !step.ComputeInputGradient()) return false;
    if (is_last) NotifyInputGradients();
    if (params_.weight_gradient == WeightGradient::kNone) return true;
    if (!step.ComputeWeightGradient(store)) return false;
    if (params_.bias != nullptr) {
      step.ComputeBiasGradient(store);
    } else if (store == Store::kOverwrite) {
      ClearBiasGradient();
    }
    return true;
  }

  const LinearCrossEntropyParams& params_;
  const Arithmetic arithmetic_;
  LinearCrossEntropyStats& stats_;
  const RowRecord record_;
  const double class_weight_sum_;
  const WeightMatrix weight_;
  Workspace tile_;
  SoftTile soft_tile_;  // with a teacher
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
