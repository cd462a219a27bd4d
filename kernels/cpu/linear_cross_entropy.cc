// The fused step on the CPU. Per tile of rows (docs/numerics.md has the formulas):
//
//   1. logits by blocks of the vocabulary, each turned at once into E = e^(z - offset) 2^-exponent in place,
//   with row
//      sums in fp64. The row's exponent comes from its first block.
//   2. rows whose sum came out of range are done again with the true maximum as offset.
//   3. loss, and the two factors of the gradient: v = g / sum, and g (p_y - 1) for the label, whose own E is
//   taken out of
//      the tile.
//   4. dX = v E W + g (p_y - 1) W_y.
//   5. dW += Eᵀ (v X), then dW_y += g (p_y - 1) x.
#include "kernels/linear_cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/fp32_products.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/workspace.h"
#include "kernels/validate.h"

namespace lossd::kernels {
namespace cpu {
namespace {

// The first block's maximum m gives a lower bound of the row's sum: 2^-kHeadroom after the offset. Sums up to
// 2^kLargestSum are accepted, so a row is done again only if its log-sum-exp lies more than (kHeadroom +
// kLargestSum) ln 2 = 72 above m. Both ends are far enough inside fp32 for the products with W and X.
constexpr int32_t kHeadroom = 40;
constexpr double kLargestSum = 0x1p64;
// Beyond this an fp32 logit has no fraction and e^z no meaning but through differences to the maximum.
constexpr float kLargestPlainLogit = 0x1p24f;

// Rows that are done again together with what lies between them; a multiple of kRowAlignment.
constexpr int64_t kRedoRows = 48;
// Columns of dW or dX that one task of the elementwise passes works on.
constexpr int64_t kColumnsPerTask = 64;

constexpr double kLn2 = 0.693147180559945309417;

class Step {
 public:
  Step(const LinearCrossEntropyParams& params, const SimdKernels& kernels, LinearCrossEntropyStats* stats)
      : params_(params),
        kernels_(kernels),
        stats_(*stats),
        weight_{params.weight_type, params.weight, params.vocab, params.hidden} {}

  Status Run() {
    const int64_t tile_rows =
        RowsWithin(params_.workspace_bytes, params_.vocab, params_.hidden, params_.weight_type);
    if (tile_rows < 1) return Status::kWorkspaceTooSmall;
    ClearIgnoredRows();
    int64_t next = NextValid(0);
    bool first = true;
    while (next < params_.tokens) {
      next = TakeRows(next, tile_rows);
      ProcessTile(first, next >= params_.tokens);
      first = false;
    }
    if (first) FinishWithoutRows();
    return Status::kOk;
  }

 private:
  bool IsIgnored(int64_t row) const { return params_.labels[row] == params_.ignore_index; }

  int64_t NextValid(int64_t row) const {
    while (row < params_.tokens && IsIgnored(row)) ++row;
    return row;
  }

  char* DxRow(int64_t index) const {
    return static_cast<char*>(params_.dx) + index * params_.hidden * SizeOf(params_.dx_type);
  }

  void ClearIgnoredRows() {
    for (int64_t r = 0; r < params_.tokens; ++r) {
      if (!IsIgnored(r)) continue;
      params_.losses[r] = 0.0f;
      if (params_.log_sum_exp != nullptr) params_.log_sum_exp[r] = 0.0f;
      if (params_.dx != nullptr) {
        std::memset(DxRow(r), 0, static_cast<size_t>(params_.hidden * SizeOf(params_.dx_type)));
      }
    }
  }

  void FinishWithoutRows() {
    NotifyInputGradients();
    if (params_.weight_gradient != WeightGradient::kOverwrite) return;
    std::memset(params_.dw, 0, static_cast<size_t>(params_.vocab * params_.hidden) * sizeof(float));
  }

  void NotifyInputGradients() const {
    if (params_.on_input_gradients != nullptr) params_.on_input_gradients(params_.on_input_gradients_context);
  }

  // Puts the next valid rows, at most `limit`, into the tile. `row` is valid; returns the first valid row
  // that was not taken, or the number of rows.
  int64_t TakeRows(int64_t row, int64_t limit) {
    int64_t count = 0;
    for (int64_t r = row; r < params_.tokens && count < limit; ++r) count += !IsIgnored(r);
    LayOut(count, params_.vocab, params_.hidden, params_.workspace, &tile_);
    threads_ = std::min(AvailableThreads(), tile_.threads);
    for (int64_t i = 0; i < count; ++i) {
      tile_.row_states[i] = RowState{.index = row, .label = params_.labels[row]};
      row = NextValid(row + 1);
    }
    stats_.valid_tokens += count;
    return row;
  }

  void ProcessTile(bool is_first, bool is_last) {
    PackRows();
    ChooseExponents();
    ComputeExponentials();
    RedoRowsOutOfRange();
    FinishRows();
    if (params_.dx != nullptr) ComputeInputGradient();
    if (is_last) NotifyInputGradients();
    if (params_.weight_gradient == WeightGradient::kNone) return;
    const bool overwrite = is_first && params_.weight_gradient == WeightGradient::kOverwrite;
    ComputeWeightGradient(overwrite ? Store::kOverwrite : Store::kAdd);
  }

  // Divides the tile's rows for `tasks_per_row_range` parallel tasks each, so that there is work for every
  // thread.
  int64_t RowsPerTask(int64_t tasks_per_row_range, int64_t smallest) const {
    const int64_t ranges = CeilDivide(4 * threads_, tasks_per_row_range);
    if (threads_ == 1 || ranges == 1) return tile_.padded_rows;
    return std::max(smallest, RoundUp(CeilDivide(tile_.padded_rows, ranges), kRowAlignment));
  }

  Range RowRange(int64_t index, int64_t size) const {
    return {index * size, std::min((index + 1) * size, tile_.padded_rows)};
  }

  // Rounds X to the weight's type and packs it for the logits product.
  void PackRows() {
    constexpr int64_t kDepth = 2048;
    ParallelFor(
        threads_, CeilDivide(tile_.padded_rows, kernels_.tile_rows), [&](int64_t panel, int64_t thread) {
          float* wide = tile_.Scratch(thread);
          float* narrow = wide + kRowAlignment * kDepth;
          const int64_t first = panel * kernels_.tile_rows;
          const int64_t rows = std::clamp<int64_t>(tile_.rows - first, 0, kernels_.tile_rows);
          for (int64_t k = 0; k < params_.hidden; k += kDepth) {
            const int64_t depth = std::min(kDepth, params_.hidden - k);
            for (int64_t i = 0; i < rows; ++i) {
              const char* x =
                  static_cast<const char*>(params_.hidden_states) +
                  (tile_.row_states[first + i].index * params_.hidden + k) * SizeOf(params_.hidden_type);
              Convert(params_.hidden_type, x, params_.weight_type, narrow, depth);
              Convert(params_.weight_type, narrow, DataType::kFloat32, wide + i * kDepth, depth);
            }
            kernels_.pack_transposed(DataType::kFloat32, wide, kDepth, rows, depth, kernels_.tile_rows,
                                     tile_.x + first * params_.hidden + k * kernels_.tile_rows);
          }
        });
  }

  // Logits of the first block, and from their maximum each row's exponent.
  void ChooseExponents() {
    const int64_t size = RowsPerTask(1, kRedoRows);
    const int64_t columns = std::min(kBlock, params_.vocab);
    ParallelFor(threads_, CeilDivide(tile_.padded_rows, size), [&](int64_t task, int64_t thread) {
      const Range rows = RowRange(task, size);
      MultiplyLogits(kernels_, weight_, tile_, 0, rows, tile_.Scratch(thread));
      for (int64_t r = rows.begin; r < std::min(rows.end, tile_.rows); ++r) {
        const float largest = kernels_.max_row(tile_.Exponentials(0, r), columns);
        RowState& row = tile_.row_states[r];
        const bool plain = std::fabs(largest) <= kLargestPlainLogit;  // false for NaN
        row.exponent = plain ? static_cast<int32_t>(std::lrint(largest / kLn2)) + kHeadroom : 0;
        // Such a row is done again whatever its sum: infinity makes sure of it.
        row.offset = plain ? 0.0f : -std::numeric_limits<float>::infinity();
      }
    });
  }

  void ComputeExponentials() {
    const int64_t size = RowsPerTask(tile_.blocks, kRedoRows);
    const int64_t ranges = CeilDivide(tile_.padded_rows, size);
    ParallelFor(threads_, tile_.blocks * ranges, [&](int64_t task, int64_t thread) {
      const int64_t block = task / ranges;
      const Range rows = RowRange(task % ranges, size);
      if (block != 0) MultiplyLogits(kernels_, weight_, tile_, block, rows, tile_.Scratch(thread));
      Exponentiate(block, rows);
    });
    SumRows({0, tile_.rows});
  }

  // Turns the logits of a block into E, and takes the label's own out of it.
  void Exponentiate(int64_t block, Range rows) {
    const int64_t first = block * kBlock;
    const int64_t columns = std::min(kBlock, params_.vocab - first);
    for (int64_t r = rows.begin; r < std::min(rows.end, tile_.rows); ++r) {
      RowState& row = tile_.row_states[r];
      float* values = tile_.Exponentials(block, r);
      const int64_t label = row.label - first;
      const bool has_label = label >= 0 && label < columns;
      if (has_label) row.target_logit = values[label];
      tile_.block_sums[block * tile_.padded_rows + r] =
          kernels_.exp_row(values, columns, row.offset, row.exponent);
      if (has_label) {
        row.target_exponential = values[label];
        values[label] = 0.0f;
      }
    }
  }

  void SumRows(Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      double sum = 0;
      for (int64_t block = 0; block < tile_.blocks; ++block)
        sum += tile_.block_sums[block * tile_.padded_rows + r];
      tile_.row_states[r].sum = sum;
    }
  }

  bool OutOfRange(int64_t r) const { return !(tile_.row_states[r].sum <= kLargestSum); }

  // Whole groups of kRedoRows rows are computed again, since the logits of a group are one product; rows of
  // the group that were in range keep their exponent and thus every bit.
  void RedoRowsOutOfRange() {
    for (int64_t begin = 0; begin < tile_.rows; begin += kRedoRows) {
      const Range valid{begin, std::min(begin + kRedoRows, tile_.rows)};
      int64_t redone = 0;
      for (int64_t r = valid.begin; r < valid.end; ++r) redone += OutOfRange(r);
      if (redone == 0) continue;
      stats_.rows_redone += redone;
      const Range rows{begin, std::min(begin + kRedoRows, tile_.padded_rows)};
      ParallelFor(threads_, tile_.blocks, [&](int64_t block, int64_t thread) {
        MultiplyLogits(kernels_, weight_, tile_, block, rows, tile_.Scratch(thread));
      });
      for (int64_t r = valid.begin; r < valid.end; ++r) {
        if (OutOfRange(r)) UseTrueMaximum(r);
      }
      ParallelFor(threads_, tile_.blocks, [&](int64_t block, int64_t) { Exponentiate(block, rows); });
      SumRows(valid);
    }
  }

  void UseTrueMaximum(int64_t r) {
    float largest = -std::numeric_limits<float>::infinity();
    bool finite = true;
    for (int64_t block = 0; block < tile_.blocks; ++block) {
      const float* logits = tile_.Exponentials(block, r);
      const int64_t columns = std::min(kBlock, params_.vocab - block * kBlock);
      finite = finite && CountNonFinite(DataType::kFloat32, logits, columns) == 0;
      largest = std::max(largest, kernels_.max_row(logits, columns));
    }
    RowState& row = tile_.row_states[r];
    row.overflowed = !finite;
    row.offset = finite ? largest : 0.0f;
    row.exponent = 0;
  }

  void FinishRows() {
    const double scale = params_.gradient_scale;
    for (int64_t r = 0; r < tile_.rows; ++r) {
      RowState& row = tile_.row_states[r];
      if (row.overflowed) {
        FinishOverflowedRow(r);
        continue;
      }
      const double own = row.target_exponential;
      const double others = row.sum - own;
      const double log_sum_exp = std::log(row.sum) + row.exponent * kLn2 + row.offset;
      double loss = log_sum_exp - row.target_logit;  // where the label's own E is below the range
      if (own > 0) loss = own > others ? std::log1p(others / own) : std::log(row.sum / own);
      params_.losses[row.index] = static_cast<float>(loss);
      if (params_.log_sum_exp != nullptr) params_.log_sum_exp[row.index] = static_cast<float>(log_sum_exp);
      row.scale = static_cast<float>(scale / row.sum);
      row.target_gradient = static_cast<float>(-scale * (others / row.sum));
    }
  }

  // Its loss and dX say so; nothing of it may reach dW, where 0 * NaN would spoil every other row's work.
  void FinishOverflowedRow(int64_t r) {
    RowState& row = tile_.row_states[r];
    const float nan = std::numeric_limits<float>::quiet_NaN();
    params_.losses[row.index] = nan;
    if (params_.log_sum_exp != nullptr) params_.log_sum_exp[row.index] = nan;
    row.scale = 0.0f;
    row.target_gradient = 0.0f;
    for (int64_t block = 0; block < tile_.blocks; ++block) {
      std::memset(tile_.Exponentials(block, r), 0, kBlock * sizeof(float));
    }
  }

  void ComputeInputGradient() {
    int64_t width = kBlock;
    while (width > kColumnAlignment && CeilDivide(params_.hidden, width) < threads_) width /= 2;
    const int64_t column_ranges = CeilDivide(params_.hidden, width);
    const int64_t size = RowsPerTask(column_ranges, 4 * kRedoRows);
    ParallelFor(
        threads_, column_ranges * CeilDivide(tile_.padded_rows, size), [&](int64_t task, int64_t thread) {
          const int64_t column = task % column_ranges * width;
          MultiplyInputGradient(kernels_, weight_, tile_, RowRange(task / column_ranges, size),
                                {column, std::min(column + width, params_.hidden)}, tile_.Scratch(thread));
        });
    ParallelFor(threads_, tile_.rows,
                [&](int64_t r, int64_t thread) { WriteInputGradient(r, tile_.Scratch(thread)); });
  }

  void WriteInputGradient(int64_t r, float* scratch) {
    const RowState& row = tile_.row_states[r];
    float* dx = tile_.dx + r * tile_.padded_hidden;
    for (int64_t h = 0; h < params_.hidden; h += kScratchFloats) {
      const int64_t count = std::min(kScratchFloats, params_.hidden - h);
      Convert(params_.weight_type, weight_.At(row.label, h), DataType::kFloat32, scratch, count);
      for (int64_t i = 0; i < count; ++i)
        dx[h + i] = row.scale * dx[h + i] + row.target_gradient * scratch[i];
    }
    if (row.overflowed) std::fill(dx, dx + params_.hidden, std::numeric_limits<float>::quiet_NaN());
    Convert(DataType::kFloat32, dx, params_.dx_type, DxRow(row.index), params_.hidden);
  }

  void ComputeWeightGradient(Store store) {
    ParallelFor(threads_, CeilDivide(tile_.rows, kBlock),
                [&](int64_t block, int64_t) { PackScaledRows(kernels_, params_.hidden, tile_, block); });
    int64_t width = tile_.padded_hidden;
    while (width > kColumnsPerTask && tile_.blocks * CeilDivide(params_.hidden, width) < 4 * threads_) {
      width = RoundUp(width / 2, kColumnAlignment);
    }
    const int64_t ranges = CeilDivide(params_.hidden, width);
    ParallelFor(threads_, tile_.blocks * ranges, [&](int64_t task, int64_t thread) {
      const int64_t column = task % ranges * width;
      MultiplyWeightGradient(kernels_, weight_, tile_, task / ranges,
                             {column, std::min(column + width, params_.hidden)}, store, params_.dw,
                             tile_.Scratch(thread));
    });
    AddTargets();
  }

  // dW_y += g (p_y - 1) x: each task owns some columns of dW and goes through the rows in order, so that the
  // order of additions is the same on any number of threads.
  void AddTargets() {
    const int64_t hidden = params_.hidden;
    ParallelFor(threads_, CeilDivide(hidden, kColumnsPerTask), [&](int64_t task, int64_t) {
      const int64_t begin = task * kColumnsPerTask;
      const int64_t end = std::min(begin + kColumnsPerTask, hidden);
      for (int64_t r = 0; r < tile_.rows; ++r) {
        const RowState& row = tile_.row_states[r];
        const float* x = PackedRow(kernels_, tile_, hidden, r);
        float* dw = params_.dw + row.label * hidden;
        for (int64_t h = begin; h < end; ++h) dw[h] += row.target_gradient * x[h * kernels_.tile_rows];
      }
    });
  }

  const LinearCrossEntropyParams& params_;
  const SimdKernels& kernels_;
  LinearCrossEntropyStats& stats_;
  const WeightMatrix weight_;
  Workspace tile_;
  int64_t threads_ = 1;
};

}  // namespace
}  // namespace cpu

Status CpuLinearCrossEntropy(const LinearCrossEntropyParams& params, LinearCrossEntropyStats* stats) {
  LinearCrossEntropyStats local;
  LinearCrossEntropyStats& result = stats == nullptr ? local : *stats;
  result = {};
  if (const Status status = ValidateStep(params); status != Status::kOk) return status;
  return cpu::Step(params, cpu::BestSimdKernels(), &result).Run();
}

}  // namespace lossd::kernels
