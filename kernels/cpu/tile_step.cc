#include "kernels/cpu/tile_step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.h"
#include "kernels/row_range.h"

namespace lossd::kernels::cpu {
namespace {

// Beyond this an fp32 logit has no fraction: only differences to the maximum are meaningful.
constexpr float kLargestPlainLogit = 0x1p24f;

// Rows that are done again together; a multiple of kRowAlignment. Also the fewest rows that are worth packing
// a block of the weights for once more.
constexpr int64_t kRedoRows = 48;
// Columns of dW that one task of AddTargets works on, and the fewest of one product.
constexpr int64_t kColumnsPerTask = 64;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kLn2 = 0.693147180559945309417;

// Through the bits, which order like the magnitudes: compilers vectorise that. NaN counts as largest.
float LargestMagnitude(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7FFFFFFFU);
  }
  return std::bit_cast<float>(largest);
}

}  // namespace

TileStep::TileStep(const LinearCrossEntropyParams& params, const SimdKernels& kernels,
                   const WeightMatrix& weight, const Workspace& tile, Products& products)
    : params_(params),
      kernels_(kernels),
      weight_(weight),
      tile_(tile),
      products_(products),
      threads_(std::min(AvailableThreads(), tile.threads)) {}

bool TileStep::ComputeLosses(int64_t* rows_redone) {
  PackRows();
  ProcessBlocks({0, 1}, {0, tile_.padded_rows}, RowsPerTask(1), Pass::kChooseExponentAndExponentiate);
  ProcessBlocks({1, tile_.blocks}, {0, tile_.padded_rows}, RowsPerTask(tile_.blocks), Pass::kExponentiate);
  SumRows({0, tile_.rows});
  *rows_redone = RedoRowsOutOfRange();
  for (int64_t r = 0; r < tile_.rows; ++r) FinishRow(r);
  return !failed_;
}

// Rows of one parallel task, when each range of rows has `tasks_per_row_range` of them: all, unless that
// leaves threads without work.
int64_t TileStep::RowsPerTask(int64_t tasks_per_row_range) const {
  const int64_t ranges = CeilDivide(4 * threads_, tasks_per_row_range);
  if (threads_ == 1 || ranges == 1) return tile_.padded_rows;
  return std::max(kRedoRows, RoundUp(CeilDivide(tile_.padded_rows, ranges), kRowAlignment));
}

Range TileStep::RowRange(int64_t index, int64_t size) const {
  return {index * size, std::min((index + 1) * size, tile_.padded_rows)};
}

int64_t TileStep::Columns(int64_t block) const {
  return std::min(tile_.block_columns, params_.vocab - block * tile_.block_columns);
}

// Rounds X to the weight's type and stores it for the logits product.
void TileStep::PackRows() {
  constexpr int64_t kDepth = 2048;
  const int64_t panel_rows = products_.rows_per_panel();
  ParallelFor(threads_, CeilDivide(tile_.padded_rows, panel_rows), [&](int64_t panel, int64_t thread) {
    float* wide = tile_.Scratch(thread);
    float* narrow = wide + kRowAlignment * kDepth;
    const int64_t first = panel * panel_rows;
    const int64_t rows = std::clamp<int64_t>(tile_.rows - first, 0, panel_rows);
    for (int64_t column = 0; column < params_.hidden; column += kDepth) {
      const int64_t depth = std::min(kDepth, params_.hidden - column);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t element = tile_.row_states[first + i].index * params_.hidden + column;
        const char* x =
            static_cast<const char*>(params_.hidden_states) + element * SizeOf(params_.hidden_type);
        Convert(params_.hidden_type, x, params_.weight_type, narrow, depth);
        Convert(params_.weight_type, narrow, DataType::kFloat32, wide + i * kDepth, depth);
        RowState& row = tile_.row_states[first + i];
        row.largest = std::max(row.largest, LargestMagnitude(wide + i * kDepth, depth));
      }
      products_.PackRows(first, rows, column, depth, wide, kDepth);
    }
  });
}

void TileStep::ProcessBlocks(Range blocks, Range rows, int64_t rows_per_task, Pass pass) {
  const int64_t ranges = CeilDivide(rows.end - rows.begin, rows_per_task);
  ParallelFor(threads_, (blocks.end - blocks.begin) * ranges, [&](int64_t task, int64_t thread) {
    const int64_t begin = rows.begin + task % ranges * rows_per_task;
    ProcessBlock(blocks.begin + task / ranges, {begin, std::min(begin + rows_per_task, rows.end)}, pass,
                 tile_.Scratch(thread));
  });
}

void TileStep::ProcessBlock(int64_t block, Range rows, Pass pass, float* scratch) {
  const int64_t columns = Columns(block);
  for (int64_t begin = rows.begin; begin < rows.end; begin += products_.logit_rows()) {
    const Range chunk{begin, std::min(begin + products_.logit_rows(), rows.end)};
    float* logits = products_.MultiplyLogits(block, chunk, scratch);
    if (logits == nullptr) {
      failed_ = true;
      return;
    }
    for (int64_t r = chunk.begin; r < std::min(chunk.end, tile_.rows); ++r) {
      float* values = logits + (r - chunk.begin) * tile_.block_columns;
      RowState& row = tile_.row_states[r];
      if (pass == Pass::kFindMaximum) {
        const bool finite = CountNonFinite(DataType::kFloat32, values, columns) == 0;
        tile_.BlockValue(block, r) = finite ? kernels_.max_row(values, columns) : kNaN;
        continue;
      }
      if (pass == Pass::kChooseExponentAndExponentiate) ChooseExponent(values, columns, row);
      tile_.BlockValue(block, r) = Exponentiate(values, block * tile_.block_columns, columns, row);
    }
    if (pass != Pass::kFindMaximum) products_.StoreExponentials(block, chunk, logits);
  }
}

void TileStep::ChooseExponent(const float* logits, int64_t columns, RowState& row) const {
  const float largest = kernels_.max_row(logits, columns);
  if (std::fabs(largest) <= kLargestPlainLogit) {
    row.exponent = static_cast<int32_t>(std::lrint(largest / kLn2)) + kHeadroom;
  } else {
    row.offset = -kInfinity;  // NaN comes here too; the sum will be infinite and the row done again
  }
}

// Turns logits [first, first + columns) of a row into E, takes the label's own out, and returns the sum with
// it.
double TileStep::Exponentiate(float* values, int64_t first, int64_t columns, RowState& row) const {
  const int64_t label = row.label - first;
  const bool has_label = label >= 0 && label < columns;
  if (has_label) row.target_logit = values[label];
  const double sum = kernels_.exp_row(values, columns, row.offset, row.exponent);
  if (has_label) {
    row.target_exponential = values[label];
    values[label] = 0.0f;
  }
  return sum;
}

void TileStep::SumRows(Range rows) {
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    double sum = 0;
    for (int64_t block = 0; block < tile_.blocks; ++block) sum += tile_.BlockValue(block, r);
    tile_.row_states[r].sum = sum;
  }
}

// The logits of kRedoRows rows are computed again as one product. Rows among them that were in range keep
// their offset and exponent, and so every bit.
int64_t TileStep::RedoRowsOutOfRange() {
  const auto out_of_range = [this](int64_t r) { return !(tile_.row_states[r].sum <= kLargestSum); };
  int64_t redone = 0;
  for (int64_t begin = 0; begin < tile_.rows; begin += kRedoRows) {
    const Range valid{begin, std::min(begin + kRedoRows, tile_.rows)};
    const Range rows{begin, std::min(begin + kRedoRows, tile_.padded_rows)};
    int64_t found = 0;
    for (int64_t r = valid.begin; r < valid.end; ++r) found += out_of_range(r);
    if (found == 0) continue;
    redone += found;
    ProcessBlocks({0, tile_.blocks}, rows, kRedoRows, Pass::kFindMaximum);
    for (int64_t r = valid.begin; r < valid.end; ++r) {
      if (out_of_range(r)) UseTrueMaximum(r);
    }
    ProcessBlocks({0, tile_.blocks}, rows, kRedoRows, Pass::kExponentiate);
    SumRows(valid);
  }
  return redone;
}

void TileStep::UseTrueMaximum(int64_t r) {
  double largest = -kInfinity;
  bool finite = true;
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    finite = finite && std::isfinite(tile_.BlockValue(block, r));
    largest = std::max(largest, tile_.BlockValue(block, r));
  }
  RowState& row = tile_.row_states[r];
  row.overflowed = !finite;
  row.offset = finite ? static_cast<float>(largest) : 0.0f;
  row.exponent = 0;
}

void TileStep::FinishRow(int64_t r) {
  RowState& row = tile_.row_states[r];
  if (row.overflowed) return FinishOverflowedRow(r);
  const double own = row.target_exponential;
  const double others = row.sum - own;
  const double log_sum_exp = std::log(row.sum) + row.exponent * kLn2 + row.offset;
  double loss = log_sum_exp - row.target_logit;  // where the label's own E is below the range
  if (own > 0) loss = own > others ? std::log1p(others / own) : std::log(row.sum / own);
  params_.losses[row.index] = static_cast<float>(loss);
  if (params_.returns.log_sum_exp != nullptr)
    params_.returns.log_sum_exp[row.index] = static_cast<float>(log_sum_exp);
  const double scale = params_.gradient_scale;
  row.scale = static_cast<float>(scale / row.sum);
  row.target_gradient = static_cast<float>(-scale * (others / row.sum));
  if ((params_.dx != nullptr || params_.dw != nullptr) && !GradientInRange(row)) FinishOverflowedRow(r);
}

// Whether v X and g X are far enough from infinity that sums of many such rows are too.
bool TileStep::GradientInRange(const RowState& row) const {
  const double largest = row.largest;
  return std::fabs(params_.gradient_scale) * largest < kLargestContribution &&
         std::fabs(row.scale) * largest < kLargestScaledRow;
}

// Its loss and dX say so; nothing of it may reach dW, where 0 * NaN would spoil every other row's work.
void TileStep::FinishOverflowedRow(int64_t r) {
  RowState& row = tile_.row_states[r];
  row.overflowed = true;
  params_.losses[row.index] = kNaN;
  if (params_.returns.log_sum_exp != nullptr) params_.returns.log_sum_exp[row.index] = kNaN;
  row.scale = 0.0f;
  row.target_gradient = 0.0f;
  products_.ZeroExponentials(r);
}

bool TileStep::ComputeInputGradient() {
  int64_t width = kBlock;
  while (width > kColumnAlignment && CeilDivide(params_.hidden, width) < threads_) width /= 2;
  const int64_t column_ranges = CeilDivide(params_.hidden, width);
  const int64_t size = RowsPerTask(column_ranges);
  ParallelFor(threads_, column_ranges * CeilDivide(tile_.padded_rows, size),
              [&](int64_t task, int64_t thread) {
                const int64_t column = task % column_ranges * width;
                const Range columns{column, std::min(column + width, params_.hidden)};
                if (!products_.MultiplyInputGradient(RowRange(task / column_ranges, size), columns,
                                                     tile_.Scratch(thread))) {
                  failed_ = true;
                }
              });
  if (failed_) return false;
  ParallelFor(threads_, CeilDivide(tile_.rows, kRowAlignment), [&](int64_t task, int64_t thread) {
    const Range rows = RowRange(task, kRowAlignment);
    for (int64_t r = rows.begin; r < std::min(rows.end, tile_.rows); ++r) {
      WriteInputGradient(r, tile_.Scratch(thread));
    }
  });
  return true;
}

void TileStep::WriteInputGradient(int64_t r, float* scratch) {
  const RowState& row = tile_.row_states[r];
  float* dx = tile_.dx + r * tile_.padded_hidden;
  for (int64_t column = 0; column < params_.hidden; column += tile_.scratch_floats) {
    const int64_t count = std::min(tile_.scratch_floats, params_.hidden - column);
    Convert(params_.weight_type, weight_.At(row.label, column), DataType::kFloat32, scratch, count);
    float* out = dx + column;
    for (int64_t i = 0; i < count; ++i) out[i] = row.scale * out[i] + row.target_gradient * scratch[i];
  }
  if (row.overflowed) std::fill(dx, dx + params_.hidden, kNaN);
  char* to = static_cast<char*>(params_.dx) + row.index * params_.hidden * SizeOf(params_.dx_type);
  Convert(DataType::kFloat32, dx, params_.dx_type, to, params_.hidden);
}

bool TileStep::ComputeWeightGradient(Store store) {
  ParallelFor(threads_, CeilDivide(tile_.rows, kBlock), [&](int64_t row_block, int64_t thread) {
    products_.PackScaledRows(row_block, tile_.Scratch(thread));
  });
  int64_t width = tile_.padded_hidden;
  while (width > kColumnsPerTask && tile_.blocks * CeilDivide(params_.hidden, width) < 4 * threads_) {
    width = RoundUp(width / 2, kColumnAlignment);
  }
  const int64_t ranges = CeilDivide(params_.hidden, width);
  ParallelFor(threads_, tile_.blocks * ranges, [&](int64_t task, int64_t thread) {
    const int64_t column = task % ranges * width;
    const Range columns{column, std::min(column + width, params_.hidden)};
    if (!products_.MultiplyWeightGradient(task / ranges, columns, store, params_.dw, tile_.Scratch(thread))) {
      failed_ = true;
    }
  });
  if (failed_) return false;
  AddTargets();
  return true;
}

// dW_y += g (p_y - 1) x: each task owns some columns of dW and goes through the rows in order, so that the
// order of additions is the same on any number of threads.
void TileStep::AddTargets() {
  ParallelFor(threads_, CeilDivide(params_.hidden, kColumnsPerTask), [&](int64_t task, int64_t) {
    const int64_t column = task * kColumnsPerTask;
    const int64_t count = std::min(kColumnsPerTask, params_.hidden - column);
    float x[kColumnsPerTask];
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const RowState& row = tile_.row_states[r];
      if (row.overflowed) continue;
      products_.UnpackRow(r, column, count, x);
      float* dw = params_.dw + row.label * params_.hidden + column;
      for (int64_t i = 0; i < count; ++i) dw[i] += row.target_gradient * x[i];
    }
  });
}

}  // namespace lossd::kernels::cpu
