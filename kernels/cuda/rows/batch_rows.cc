#include "kernels/cuda/rows/batch_rows.h"

#include <algorithm>
#include <numeric>

namespace lossd::kernels::cuda {
namespace {

bool Any(std::span<const LabelledRows> parts, bool (*has)(const LabelledRows&)) {
  return std::any_of(parts.begin(), parts.end(), has);
}

// Whether row i is to be computed.
bool IsNeeded(const LabelledRows& part, int64_t i) {
  if (part.labels[i] == part.ignore_index) return false;
  const auto is_zero = [i](const float* values) { return values == nullptr || values[i] == 0; };
  const bool is_idle = part.token_weights != nullptr && part.token_weights[i] == 0 &&
                       is_zero(part.lse_gradients) && is_zero(part.entropy_gradients);
  return !is_idle || part.wants_unweighted;
}

}  // namespace

BatchRows SelectValidRows(std::span<const LabelledRows> parts) {
  BatchRows valid;
  int64_t tokens = 0;
  for (const LabelledRows& part : parts) tokens += part.tokens;
  const auto most = static_cast<size_t>(tokens);
  valid.batch_rows.reserve(most);
  valid.labels.reserve(most);
  for (std::vector<float>* array : {&valid.gradient_scales, &valid.shares}) array->reserve(most);
  const bool z = Any(parts, [](const LabelledRows& part) { return part.z_gradient_scale.has_value(); });
  const bool weights = Any(parts, [](const LabelledRows& part) { return part.token_weights != nullptr; });
  const bool gradients = Any(parts, [](const LabelledRows& part) { return part.lse_gradients != nullptr; });
  const bool entropies =
      Any(parts, [](const LabelledRows& part) { return part.entropy_gradients != nullptr; });
  int64_t first = 0;
  for (const LabelledRows& part : parts) {
    for (int64_t i = 0; i < part.tokens; ++i) {
      if (!IsNeeded(part, i)) continue;
      valid.batch_rows.push_back(static_cast<int32_t>(first + i));
      valid.labels.push_back(static_cast<int32_t>(part.labels[i]));
      valid.gradient_scales.push_back(part.gradient_scale);
      valid.shares.push_back(part.share);
      if (z) valid.z_gradient_scales.push_back(part.z_gradient_scale.value_or(part.gradient_scale));
      if (weights) valid.token_weights.push_back(part.token_weights == nullptr ? 1 : part.token_weights[i]);
      if (gradients) valid.lse_gradients.push_back(part.lse_gradients == nullptr ? 0 : part.lse_gradients[i]);
      if (entropies) {
        valid.entropy_gradients.push_back(part.entropy_gradients == nullptr ? 0 : part.entropy_gradients[i]);
      }
    }
    first += part.tokens;
  }
  valid.rows = static_cast<int64_t>(valid.labels.size());
  const auto counts = [](float share) { return share == 1.0f; };
  if (std::all_of(valid.shares.begin(), valid.shares.end(), counts)) valid.shares.clear();
  return valid;
}

void OrderByLabel(int64_t tile_rows, BatchRows* batch) {
  batch->by_label.resize(static_cast<size_t>(batch->rows));
  for (int64_t first = 0; first < batch->rows; first += tile_rows) {
    const auto begin = batch->by_label.begin() + first;
    const auto end = begin + std::min(tile_rows, batch->rows - first);
    std::iota(begin, end, 0);
    std::stable_sort(begin, end, [&](int32_t a, int32_t b) {
      return batch->labels[static_cast<size_t>(first + a)] < batch->labels[static_cast<size_t>(first + b)];
    });
  }
}

}  // namespace lossd::kernels::cuda
