#include "kernels/cpu/logit_rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/cpu/constants.h"
#include "kernels/cpu/gathered/target_rows.h"
#include "kernels/row_range.h"

namespace lossd::kernels::cpu {
namespace {

// Beyond this an fp32 logit has no fraction: only differences to the maximum are meaningful.
constexpr float kLargestPlainLogit = 0x1p24f;

using BlockOfFloats = std::array<float, kLibraryBlock>;

}  // namespace

bool WantsMoments(const LinearCrossEntropyParams& params) {
  return params.returns.entropy != nullptr || params.entropy_gradients != nullptr;
}

LogitRows::LogitRows(const LinearCrossEntropyParams& params, const SimdKernels& kernels,
                     const Workspace& tile, GradientForm form, const SoftTargets* soft)
    : params_(params),
      kernels_(kernels),
      tile_(tile),
      form_(form),
      soft_(soft),
      order_(params.returns, tile) {}

int64_t LogitRows::Columns(int64_t block) const {
  return std::min(tile_.block_columns, params_.vocab - block * tile_.block_columns);
}

void LogitRows::Process(Pass pass, int64_t block, int64_t r, float* values) const {
  const int64_t columns = Columns(block);
  BlockOfFloats factors;
  const bool are_logits = pass != Pass::kGradient || form_ == GradientForm::kFromLogits;
  if (are_logits) Transform(block * tile_.block_columns, values, factors.data(), columns);
  const float* kept_factors = caps() ? factors.data() : nullptr;
  switch (pass) {
    case Pass::kFindMaximum:
      return FindMaximum(block, r, values);
    case Pass::kGradient:
      return FormGradient(block, r, values, kept_factors);
    case Pass::kFirstBlock:
      ChooseExponent(values, columns, tile_.row_states[r]);
      [[fallthrough]];
    case Pass::kFurtherBlocks:
    case Pass::kAgain:
      return Exponentiate(pass, block, r, values, kept_factors);
  }
}

float LogitRows::Transform(float product, int64_t entry) const {
  float factor = 0;
  Transform(entry, &product, &factor, 1);
  return product;
}

void LogitRows::Transform(int64_t first, float* values, float* factors, int64_t columns) const {
  if (params_.bias != nullptr) {
    const float* bias = params_.bias + first;
    for (int64_t i = 0; i < columns; ++i) values[i] += bias[i];
  }
  const float scale = params_.options.logit_scale;
  if (scale != 1.0f) {
    for (int64_t i = 0; i < columns; ++i) values[i] *= scale;
  }
  if (caps()) kernels_.cap_row(values, factors, columns, params_.options.softcap);
}

void LogitRows::FindMaximum(int64_t block, int64_t r, const float* values) const {
  tile_.BlockValue(block, r) = kernels_.max_row(values, Columns(block));
}

void LogitRows::ChooseExponent(const float* logits, int64_t columns, RowState& row) const {
  const float largest = kernels_.max_row(logits, columns);
  if (std::fabs(largest) <= kLargestPlainLogit) {
    row.exponent = static_cast<int32_t>(std::lrint(largest / kLn2)) + kHeadroom;
  } else {
    // NaN and -∞ come here too. The sum will be infinite and the row done again.
    row.offset = -kInfinity;
  }
}

// Turns logits into E and takes the label's own out; keeps the sum with it, and the other sums asked for.
void LogitRows::Exponentiate(Pass pass, int64_t block, int64_t r, float* values, const float* factors) const {
  const int64_t first = block * tile_.block_columns;
  const int64_t columns = Columns(block);
  RowState& row = tile_.row_states[r];
  const bool wants_moment = WantsMoments(params_);
  BlockOfFloats logits;
  if (wants_moment || order_.wants_any()) {
    const float largest = kernels_.max_row(values, columns);
    if (pass != Pass::kAgain) order_.Add(r, first, values, columns, largest);
    tile_.Detail(block, r).largest = largest;
  }
  if (wants_moment) std::memcpy(logits.data(), values, static_cast<size_t>(columns) * sizeof(float));
  if (smooths()) {
    const float* weights = params_.class_weights == nullptr ? nullptr : params_.class_weights + first;
    tile_.Detail(block, r).weighted_logits = kernels_.sum_row(values, weights, columns);
  }

  const int64_t label = row.label - first;
  const bool has_label = label >= 0 && label < columns;
  if (has_label) row.target_logit = values[label];
  if (has_label && factors != nullptr) tile_.row_details[r].label_factor = factors[label];
  tile_.BlockValue(block, r) = kernels_.exp_row(values, columns, row.offset, row.exponent);
  if (wants_moment) {
    BlockDetail& detail = tile_.Detail(block, r);
    detail.moment = kernels_.moment_row(values, logits.data(), columns, detail.largest);
  }
  if (has_label) {
    row.target_exponential = values[label];
    values[label] = 0.0f;
  }
  if (factors == nullptr) return;
  for (int64_t i = 0; i < columns; ++i) values[i] *= factors[i];
}

struct LogitRows::Listed {
  BlockOfFloats values;
  std::array<int32_t, kLibraryBlock> columns;
  size_t count = 0;

  void Add(int32_t column, float value) {
    values[count] = value;
    columns[count++] = column;
  }
  void WriteTo(float* to) const {
    for (size_t i = 0; i < count; ++i) to[columns[i]] = values[i];
  }
};

void LogitRows::FormListed(int64_t block, int64_t r, const float* exponentials, const float* logits,
                           const float* factors, Listed* listed) const {
  const int64_t first = block * tile_.block_columns;
  const RowDetail& detail = tile_.row_details[r];
  const TargetRow row = TargetRowOf(params_.target_lists, tile_.row_states[r].index);
  const auto begin = std::lower_bound(row.tokens.begin(), row.tokens.end(), first);
  for (auto at = begin; at != row.tokens.end() && *at < first + Columns(block); ++at) {
    const auto i = static_cast<size_t>(at - row.tokens.begin());
    const int64_t column = *at - first;
    float slope = detail.listed_slope;
    if (params_.entropy_gradients != nullptr && exponentials[column] > 0) {
      slope -= detail.spread * (logits[column] - detail.largest - detail.mean);
    }
    const float value = slope * exponentials[column] - detail.target * row.probabilities[i];
    listed->Add(static_cast<int32_t>(column), factors == nullptr ? value : value * factors[column]);
  }
}

// The row's sums are known, and with them its slope and level.
void LogitRows::FormGradient(int64_t block, int64_t r, float* values, const float* factors) const {
  const int64_t first = block * tile_.block_columns;
  const int64_t columns = Columns(block);
  const RowState& row = tile_.row_states[r];
  const RowDetail& detail = tile_.row_details[r];
  if (row.overflowed) {
    std::fill_n(values, columns, 0.0f);
    return;
  }
  BlockOfFloats logits;
  const bool spreads = params_.entropy_gradients != nullptr;
  if (soft_ != nullptr || spreads) {
    std::memcpy(logits.data(), values, static_cast<size_t>(columns) * sizeof(float));
  }
  if (form_ == GradientForm::kFromLogits) kernels_.exp_row(values, columns, row.offset, row.exponent);
  Listed listed;
  if (params_.target_lists.given()) FormListed(block, r, values, logits.data(), factors, &listed);
  const float* weights = params_.class_weights == nullptr ? nullptr : params_.class_weights + first;
  float slope = detail.slope;
  if (spreads) {
    kernels_.spread_row(values, logits.data(), columns,
                        {detail.slope, detail.spread, detail.largest, detail.mean});
    slope = 1;
  }
  if (soft_ == nullptr) {
    kernels_.gradient_row(values, weights, factors, columns, slope, detail.level);
  } else {
    kernels_.gradient_row(values, weights, nullptr, columns, slope, detail.level);
    soft_->AddGradient(block, r, logits.data(), values);
    if (factors != nullptr) {
      for (int64_t i = 0; i < columns; ++i) values[i] *= factors[i];
    }
  }
  listed.WriteTo(values);
  const int64_t label = row.label - first;
  if (label >= 0 && label < columns) values[label] = 0.0f;
}

}  // namespace lossd::kernels::cpu
