#include "kernels/cpu/segments/segment_step.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/constants.h"
#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/parallel.h"
#include "kernels/row_range.h"

namespace lossd::kernels::cpu {
namespace {

// Rows that are done again together; a multiple of kRowAlignment. Also the fewest rows that are worth packing
// a block of the weights for once more.
constexpr int64_t kRedoRows = 48;
// Columns of dW that one task of AddTargets works on, and the fewest of one product.
constexpr int64_t kColumnsPerTask = 64;

}  // namespace

RowRecord RecordFor(const LinearCrossEntropyParams& params) {
  const bool plain = params.options.softcap == 0 && params.options.label_smoothing == 0 &&
                     !params.returns.whole_row() && params.teacher == nullptr &&
                     params.entropy_gradients == nullptr && !params.target_lists.given();
  return plain ? RowRecord::kPlain : RowRecord::kFull;
}

GradientForm FormFor(const LinearCrossEntropyParams& params, Arithmetic arithmetic) {
  const bool wants_gradient = params.dx != nullptr || params.weight_gradient != WeightGradient::kNone;
  if (!wants_gradient) return GradientForm::kExponentials;
  if (params.teacher != nullptr || params.entropy_gradients != nullptr) return GradientForm::kFromLogits;
  const bool own_parts = params.options.label_smoothing > 0 || params.target_lists.given();
  if (!own_parts) return GradientForm::kExponentials;
  // E times the softcap's derivative does not tell which is which, and E in 16 bits has lost digits.
  const bool keeps = params.options.softcap == 0 && arithmetic == Arithmetic::kSimd;
  return keeps ? GradientForm::kFromExponentials : GradientForm::kFromLogits;
}

SegmentStep::SegmentStep(const LinearCrossEntropyParams& params, const SimdKernels& kernels,
                         const WeightMatrix& weight, const Workspace& tile, Products& products,
                         GradientForm form, const SoftTargets* soft)
    : params_(params),
      weight_(weight),
      tile_(tile),
      products_(products),
      soft_(soft),
      form_(form),
      logit_rows_(params, kernels, tile, form, soft),
      threads_(std::min(AvailableThreads(), tile.threads)) {}

void SegmentStep::PackHiddenStates() {
  PackRows({params_.hidden_type, params_.hidden_states, params_.hidden}, params_.weight_type, tile_,
           products_, threads_);
}

bool SegmentStep::ComputeSums() {
  const Range all_rows{0, tile_.padded_rows};
  const int64_t first_blocks = std::min<int64_t>(tile_.blocks, 1);
  ProcessBlocks({0, first_blocks}, all_rows, RowsPerTask(1), Pass::kFirstBlock);
  ProcessBlocks({first_blocks, tile_.blocks}, all_rows, RowsPerTask(tile_.blocks), Pass::kFurtherBlocks);
  SumRows({0, tile_.rows});
  RedoRowsOutOfRange();
  return !failed_;
}

RowSums SegmentStep::Sums(int64_t r) const {
  const RowState& row = tile_.row_states[r];
  RowSums sums{.sum = row.sum,
               .units = {row.offset, row.exponent},
               .overflowed = row.overflowed,
               .redone = row.redone,
               .target_logit = row.target_logit,
               .target_exponential = row.target_exponential};
  if (params_.options.label_smoothing > 0) {
    for (int64_t block = 0; block < tile_.blocks; ++block) {
      sums.weighted_logits += tile_.Detail(block, r).weighted_logits;
    }
  }
  if (WantsMoments(params_)) AddMoments(r, &sums);
  if (tile_.row_details == nullptr) return sums;
  sums.above = tile_.row_details[r].above;
  sums.label_factor = tile_.row_details[r].label_factor;
  return sums;
}

void SegmentStep::AddMoments(int64_t r, RowSums* sums) const {
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    sums->largest = std::max(sums->largest, tile_.Detail(block, r).largest);
  }
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    const BlockDetail& detail = tile_.Detail(block, r);
    const double sum = tile_.BlockValue(block, r);
    if (sum > 0) {
      sums->moment += detail.moment - (static_cast<double>(sums->largest) - detail.largest) * sum;
    }
  }
}

void SegmentStep::SetFactors(int64_t r, const RowFactors& factors, double sum) {
  RowState& row = tile_.row_states[r];
  row.overflowed = factors.overflowed;
  row.weightless = factors.weightless;
  row.scale = 0;
  row.target_gradient = HasLabel(r) ? factors.target_gradient : 0.0f;
  if (factors.overflowed) {
    products_.ZeroExponentials(r);
  } else if (form_ == GradientForm::kExponentials) {
    row.scale = static_cast<float>(factors.numerator / sum);
  } else {
    row.scale = factors.scale;
    RowDetail& detail = tile_.row_details[r];
    detail.slope = static_cast<float>(factors.numerator / sum);
    detail.level = factors.level;
    detail.spread = static_cast<float>(factors.spread / sum);
    detail.largest = factors.largest;
    detail.mean = factors.mean;
    detail.listed_slope = static_cast<float>(factors.listed_numerator / sum);
    detail.target = factors.target;
  }
}

bool SegmentStep::FormGradients() {
  if (form_ != GradientForm::kExponentials) {
    ProcessBlocks({0, tile_.blocks}, {0, tile_.padded_rows}, RowsPerTask(tile_.blocks), Pass::kGradient);
  }
  return !failed_;
}

// Rows of one parallel task, when each range of rows has `tasks_per_row_range` of them: all, unless that
// leaves threads without work.
int64_t SegmentStep::RowsPerTask(int64_t tasks_per_row_range) const {
  const int64_t ranges = CeilDivide(4 * threads_, std::max<int64_t>(tasks_per_row_range, 1));
  if (threads_ == 1 || ranges == 1) return tile_.padded_rows;
  return std::max(kRedoRows, RoundUp(CeilDivide(tile_.padded_rows, ranges), kRowAlignment));
}

Range SegmentStep::RowRange(int64_t index, int64_t size) const {
  return {index * size, std::min((index + 1) * size, tile_.padded_rows)};
}

bool SegmentStep::FindLabelLogits() {
  ParallelFor(threads_, tile_.rows, [&](int64_t r, int64_t thread) {
    if (!HasLabel(r)) return;
    float product = 0;
    if (!products_.MultiplyLogit(r, tile_.row_states[r].label, tile_.Scratch(thread), &product)) {
      failed_ = true;
    }
    tile_.row_details[r].label_logit = logit_rows_.Transform(product, tile_.row_states[r].label);
  });
  return !failed_;
}

void SegmentStep::ProcessBlocks(Range blocks, Range rows, int64_t rows_per_task, Pass pass) {
  const int64_t ranges = CeilDivide(rows.end - rows.begin, rows_per_task);
  ParallelFor(threads_, (blocks.end - blocks.begin) * ranges, [&](int64_t task, int64_t thread) {
    const int64_t begin = rows.begin + task % ranges * rows_per_task;
    ProcessBlock(blocks.begin + task / ranges, {begin, std::min(begin + rows_per_task, rows.end)}, pass,
                 tile_.Scratch(thread));
  });
}

void SegmentStep::ProcessBlock(int64_t block, Range rows, Pass pass, float* scratch) {
  for (int64_t begin = rows.begin; begin < rows.end; begin += products_.logit_rows()) {
    const Range chunk{begin, std::min(begin + products_.logit_rows(), rows.end)};
    float* values = Values(block, chunk, pass, scratch);
    if (values == nullptr) {
      failed_ = true;
      return;
    }
    if (soft_ != nullptr && (pass == Pass::kFirstBlock || pass == Pass::kFurtherBlocks)) {
      soft_->Keep(block, chunk, values);
    }
    for (int64_t r = chunk.begin; r < std::min(chunk.end, tile_.rows); ++r) {
      logit_rows_.Process(pass, block, r, values + (r - chunk.begin) * tile_.block_columns);
    }
    if (Stores(pass)) products_.StoreExponentials(block, chunk, values);
  }
}

// Returns the values that the pass begins with.
float* SegmentStep::Values(int64_t block, Range rows, Pass pass, float* scratch) {
  if (soft_ != nullptr && pass == Pass::kGradient) return KeptValues(block, rows, scratch);
  const bool stored = pass == Pass::kGradient && form_ == GradientForm::kFromExponentials;
  return stored ? products_.StoredExponentials(block, rows) : products_.MultiplyLogits(block, rows, scratch);
}

// Copies the kept logits to where MultiplyLogits would have put them.
float* SegmentStep::KeptValues(int64_t block, Range rows, float* scratch) {
  float* stored = products_.StoredExponentials(block, rows);
  float* values = stored != nullptr ? stored : scratch;
  soft_->CopyKept(block, rows, values);
  return values;
}

bool SegmentStep::Stores(Pass pass) const {
  return pass == Pass::kGradient || (pass != Pass::kFindMaximum && form_ != GradientForm::kFromLogits);
}

void SegmentStep::SumRows(Range rows) {
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    double sum = 0;
    for (int64_t block = 0; block < tile_.blocks; ++block) sum += tile_.BlockValue(block, r);
    tile_.row_states[r].sum = sum;
  }
}

// The logits of kRedoRows rows are computed again as one product. Rows among them that were in range keep
// their offset and exponent, and so every bit.
void SegmentStep::RedoRowsOutOfRange() {
  const auto out_of_range = [this](int64_t r) { return !(tile_.row_states[r].sum <= kLargestSum); };
  for (int64_t begin = 0; begin < tile_.rows; begin += kRedoRows) {
    const Range valid{begin, std::min(begin + kRedoRows, tile_.rows)};
    const Range rows{begin, std::min(begin + kRedoRows, tile_.padded_rows)};
    int64_t found = 0;
    for (int64_t r = valid.begin; r < valid.end; ++r) found += out_of_range(r);
    if (found == 0) continue;
    ProcessBlocks({0, tile_.blocks}, rows, kRedoRows, Pass::kFindMaximum);
    for (int64_t r = valid.begin; r < valid.end; ++r) {
      if (out_of_range(r)) UseTrueMaximum(r);
    }
    ProcessBlocks({0, tile_.blocks}, rows, kRedoRows, Pass::kAgain);
    SumRows(valid);
  }
}

void SegmentStep::UseTrueMaximum(int64_t r) {
  double largest = -std::numeric_limits<double>::infinity();
  bool fits = true;
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    fits = fits && tile_.BlockValue(block, r) < kInfinity;
    largest = std::max(largest, tile_.BlockValue(block, r));
  }
  RowState& row = tile_.row_states[r];
  row.redone = true;
  row.overflowed = !fits;
  // Where all logits are -∞ the sum is 0, in any units.
  row.offset = fits && largest > -kInfinity ? static_cast<float>(largest) : 0.0f;
  row.exponent = 0;
}

bool SegmentStep::MultiplyInputGradient() {
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
  return !failed_;
}

// A segment without entries has no product, and gives nothing.
void SegmentStep::ScaleInputGradient(int64_t r, float* scratch) const {
  const RowState& row = tile_.row_states[r];
  float* dx = tile_.dx + r * tile_.padded_hidden;
  if (tile_.blocks == 0) {
    std::fill(dx, dx + params_.hidden, 0.0f);
    return;
  }
  if (!HasLabel(r)) {
    for (int64_t i = 0; i < params_.hidden; ++i) dx[i] *= row.scale;
    return;
  }
  for (int64_t column = 0; column < params_.hidden; column += tile_.scratch_floats) {
    const int64_t count = std::min(tile_.scratch_floats, params_.hidden - column);
    Convert(params_.weight_type, weight_.At(row.label, column), DataType::kFloat32, scratch, count);
    float* out = dx + column;
    for (int64_t i = 0; i < count; ++i) out[i] = row.scale * out[i] + row.target_gradient * scratch[i];
  }
}

bool SegmentStep::ComputeWeightGradient(Store store) {
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

// dW_y += target_gradient x: each task owns some columns of dW and goes through the rows in order, so that
// the order of additions is the same on any number of threads.
void SegmentStep::AddTargets() {
  ParallelFor(threads_, CeilDivide(params_.hidden, kColumnsPerTask), [&](int64_t task, int64_t) {
    const int64_t column = task * kColumnsPerTask;
    const int64_t count = std::min(kColumnsPerTask, params_.hidden - column);
    float x[kColumnsPerTask];
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const RowState& row = tile_.row_states[r];
      if (row.overflowed || !HasLabel(r)) continue;
      products_.UnpackRow(r, column, count, x);
      float* dw = params_.dw + row.label * params_.hidden + column;
      for (int64_t i = 0; i < count; ++i) dw[i] += row.target_gradient * x[i];
    }
  });
}

void SegmentStep::ComputeBiasGradient(Store store) {
  ParallelFor(threads_, tile_.blocks, [&](int64_t block, int64_t thread) {
    double sums[kLibraryBlock] = {};
    SumGradients(block, tile_.Scratch(thread), sums);
    const int64_t first = block * tile_.block_columns;
    const int64_t columns = std::min(tile_.block_columns, params_.vocab - first);
    for (int64_t i = 0; i < columns; ++i) {
      const double before = store == Store::kAdd ? params_.db[first + i] : 0.0;
      params_.db[first + i] = static_cast<float>(before + sums[i]);
    }
  });
}

// Sums the gradients of a block's logits, over the tile's rows in their order.
void SegmentStep::SumGradients(int64_t block, float* scratch, double* sums) const {
  const int64_t first = block * tile_.block_columns;
  const int64_t columns = std::min(tile_.block_columns, params_.vocab - first);
  for (int64_t r = 0; r < tile_.rows; ++r) {
    const RowState& row = tile_.row_states[r];
    if (row.overflowed) continue;
    const float* exponentials = products_.ReadExponentials(block, r, scratch);
    const double scale = row.scale;
    for (int64_t i = 0; i < columns; ++i) sums[i] += scale * static_cast<double>(exponentials[i]);
    const int64_t label = row.label - first;
    if (label >= 0 && label < columns) sums[label] += row.target_gradient;
  }
}

}  // namespace lossd::kernels::cpu
