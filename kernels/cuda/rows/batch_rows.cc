#include "kernels/cuda/rows/batch_rows.h"

#include <algorithm>
#include <numeric>
#include <utility>

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

// Row i of a part, behind those that are there.
template <class Rows>
void AddList(const TokenLists& lists, int64_t i, Rows* rows) {
  if (!lists.given()) return;
  rows->tokens.insert(rows->tokens.end(), lists.tokens + lists.offsets[i],
                      lists.tokens + lists.offsets[i + 1]);
  rows->offsets.push_back(static_cast<int32_t>(rows->tokens.size()));
}
void AddTargets(const TargetLists& targets, int64_t i, TargetRows* rows) {
  if (!targets.given()) return;
  AddList(targets.lists, i, rows);
  rows->probabilities.insert(rows->probabilities.end(), targets.probabilities + targets.lists.offsets[i],
                             targets.probabilities + targets.lists.offsets[i + 1]);
}

bool IsLong(const LabelledRows& part, int64_t i, int64_t long_list) {
  return part.kept_tokens.given() && part.kept_tokens.size(i) >= long_list;
}

// Which arrays of factors the rows of a batch have.
struct Factors {
  explicit Factors(std::span<const LabelledRows> parts)
      : z(Any(parts, [](const LabelledRows& part) { return part.z_gradient_scale.has_value(); })),
        weights(Any(parts, [](const LabelledRows& part) { return part.token_weights != nullptr; })),
        gradients(Any(parts, [](const LabelledRows& part) { return part.lse_gradients != nullptr; })),
        entropies(Any(parts, [](const LabelledRows& part) { return part.entropy_gradients != nullptr; })) {}

  bool z;
  bool weights;
  bool gradients;
  bool entropies;
};

// Row i of a part that begins at `first` of the batch.
void AddRow(const LabelledRows& part, int64_t first, int64_t i, const Factors& factors, BatchRows* to) {
  const auto value_or = [i](const float* values, float none) { return values == nullptr ? none : values[i]; };
  to->batch_rows.push_back(static_cast<int32_t>(first + i));
  to->labels.push_back(static_cast<int32_t>(part.labels[i]));
  to->gradient_scales.push_back(part.gradient_scale);
  to->shares.push_back(part.share);
  if (factors.z) to->z_gradient_scales.push_back(part.z_gradient_scale.value_or(part.gradient_scale));
  if (factors.weights) to->token_weights.push_back(value_or(part.token_weights, 1));
  if (factors.gradients) to->lse_gradients.push_back(value_or(part.lse_gradients, 0));
  if (factors.entropies) to->entropy_gradients.push_back(value_or(part.entropy_gradients, 0));
  AddList(part.kept_tokens, i, &to->kept);
  AddTargets(part.target_lists, i, &to->targets);
}

}  // namespace

BatchRows SelectValidRows(std::span<const LabelledRows> parts, int64_t long_list) {
  BatchRows valid;
  int64_t tokens = 0;
  for (const LabelledRows& part : parts) tokens += part.tokens;
  const auto most = static_cast<size_t>(tokens);
  valid.batch_rows.reserve(most);
  valid.labels.reserve(most);
  for (std::vector<float>* array : {&valid.gradient_scales, &valid.shares}) array->reserve(most);
  const Factors factors(parts);
  const bool kept = Any(parts, [](const LabelledRows& part) { return part.kept_tokens.given(); });
  if (kept) valid.kept.offsets.push_back(0);
  if (Any(parts, [](const LabelledRows& part) { return part.target_lists.given(); })) {
    valid.targets.offsets.push_back(0);
  }
  const auto add = [&](bool long_ones) {
    int64_t first = 0;
    for (const LabelledRows& part : parts) {
      for (int64_t i = 0; i < part.tokens; ++i) {
        if (IsNeeded(part, i) && IsLong(part, i, long_list) == long_ones) {
          AddRow(part, first, i, factors, &valid);
        }
      }
      first += part.tokens;
    }
    return static_cast<int64_t>(valid.labels.size());
  };
  valid.rows = add(false);
  if (kept) {
    valid.kept.short_rows = valid.rows;
    valid.rows = add(true);
  }
  const auto counts = [](float share) { return share == 1.0f; };
  if (std::all_of(valid.shares.begin(), valid.shares.end(), counts)) valid.shares.clear();
  return valid;
}

void OrderByLabel(int64_t first_row, int64_t rows, BatchRows* batch) {
  const auto begin = batch->by_label.begin() + first_row;
  std::iota(begin, begin + rows, 0);
  std::stable_sort(begin, begin + rows, [&](int32_t a, int32_t b) {
    const auto label = [&](int32_t row) { return batch->labels[static_cast<size_t>(first_row + row)]; };
    return label(a) < label(b);
  });
}

void OrderByLabel(int64_t tile_rows, BatchRows* batch) {
  batch->by_label.resize(static_cast<size_t>(batch->rows));
  for (int64_t first = 0; first < batch->rows; first += tile_rows) {
    OrderByLabel(first, std::min(tile_rows, batch->rows - first), batch);
  }
}

// Counts, adds up and places: an order of as many entries as there may be takes as long as reading them does.
void OrderByToken(int64_t vocab, std::vector<KeptTile> tiles, KeptRows* kept) {
  kept->by_token.resize(kept->tokens.size());
  kept->token_starts.clear();
  std::vector<int32_t> next(static_cast<size_t>(vocab));
  int64_t end = 0;
  for (KeptTile& tile : tiles) {
    if (tile.is_long) break;
    end = tile.first_entry + tile.entries;
    const std::span<const int32_t> tokens =
        std::span(kept->tokens)
            .subspan(static_cast<size_t>(tile.first_entry), static_cast<size_t>(tile.entries));
    std::fill(next.begin(), next.end(), 0);
    for (const int32_t token : tokens) ++next[static_cast<size_t>(token)];
    tile.first_token = static_cast<int64_t>(kept->token_starts.size());
    auto place = static_cast<int32_t>(tile.first_entry);
    for (int32_t& count : next) {
      if (count > 0) kept->token_starts.push_back(place);
      place += std::exchange(count, place);
    }
    tile.tokens = static_cast<int64_t>(kept->token_starts.size()) - tile.first_token;
    auto entry = static_cast<int32_t>(tile.first_entry);
    for (const int32_t token : tokens) {
      kept->by_token[static_cast<size_t>(next[static_cast<size_t>(token)]++)] = entry++;
    }
  }
  kept->token_starts.push_back(static_cast<int32_t>(end));
  kept->tiles = std::move(tiles);
}

}  // namespace lossd::kernels::cuda
