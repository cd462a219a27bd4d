#include "kernels/cpu/gathered/kept_tokens.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <type_traits>

#include "kernels/cpu/constants.h"
#include "kernels/cpu/gathered/capped_logit.h"
#include "kernels/cpu/gathered/gathered_products.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_finish.h"
#include "kernels/rounding.h"
#include "kernels/row_range.h"

namespace lossd::kernels::cpu {
namespace {

constexpr int64_t kPieceAlignment = 64;

// Where the rows of a tile lie in the workspace: [rows, hidden] states, and the entries of their lists one
// behind the other.
struct Tile {
  int64_t rows = 0;
  float* x = nullptr;
  TokenEntry* entries = nullptr;  // in order of rows; sorted for dW
  float* factors = nullptr;       // products, then logits before the cap, then what W is multiplied by
  int64_t* indices = nullptr;     // of rows in the batch
  int64_t* first_entries = nullptr;
  bool* overflowed = nullptr;
};

int64_t LayOut(int64_t rows, int64_t entries, int64_t hidden, void* workspace, Tile* tile) {
  int64_t end = 0;
  const auto take = [&](auto** array, int64_t count) {
    *array = reinterpret_cast<std::remove_reference_t<decltype(*array)>>(static_cast<char*>(workspace) + end);
    end += RoundUp(count * static_cast<int64_t>(sizeof(**array)), kPieceAlignment);
  };
  tile->rows = rows;
  take(&tile->x, rows * hidden);
  take(&tile->entries, entries);
  take(&tile->factors, entries);
  take(&tile->indices, rows);
  take(&tile->first_entries, rows + 1);
  take(&tile->overflowed, rows);
  return end;
}

// What the logits of a row's list add up to.
struct ListSums {
  double largest = -kInfinity;  // m, of the token `best`
  int64_t best = 0;             // place in the list
  double rest = 0;              // Σ e^(s - m) without that of `best`
  double own = 0;               // e^(s - m) of the label
  double others = 0;            // the same of all but the label
  double moment = 0;            // Σ e^(s - m) (s - m)
  double label_logit = 0;
  int32_t above = 0;  // the label

  double sum() const { return own + others; }
};

class KeptStep {
 public:
  KeptStep(const LinearCrossEntropyParams& params, LinearCrossEntropyStats* stats)
      : params_(params), stats_(*stats), weights_{params.weight_type, params.weight, params.hidden} {}

  Status Run() {
    ClearDroppedRows(params_);
    if (params_.weight_gradient == WeightGradient::kOverwrite) ClearGradients();
    int64_t next = NextValid(0);
    if (next == params_.tokens) NotifyInputGradients();
    while (next < params_.tokens) {
      Tile tile;
      next = TakeRows(next, &tile);
      if (tile.rows == 0) return Status::kWorkspaceTooSmall;
      ParallelFor(AvailableThreads(), tile.rows,
                  [&](int64_t row, int64_t /*thread*/) { ComputeRow(tile, row); });
      if (next == params_.tokens) NotifyInputGradients();
      if (params_.weight_gradient != WeightGradient::kNone) AddWeightGradient(tile);
      stats_.valid_tokens += tile.rows;
    }
    return Status::kOk;
  }

 private:
  void ClearGradients() const {
    std::memset(params_.dw, 0, static_cast<size_t>(params_.vocab * params_.hidden) * sizeof(float));
    if (params_.db != nullptr) std::memset(params_.db, 0, static_cast<size_t>(params_.vocab) * sizeof(float));
  }

  void NotifyInputGradients() const {
    if (params_.on_input_gradients != nullptr) params_.on_input_gradients(params_.on_input_gradients_context);
  }

  int64_t NextValid(int64_t row) const {
    while (row < params_.tokens && IsDropped(params_, row)) ++row;
    return row;
  }

  // As many valid rows from `row` on as the workspace has room for. Returns the first that was not taken.
  int64_t TakeRows(int64_t row, Tile* tile) const {
    int64_t rows = 0;
    int64_t entries = 0;
    for (int64_t r = row; r < params_.tokens; r = NextValid(r + 1)) {
      const int64_t more = entries + params_.kept_tokens.size(r);
      if (LayOut(rows + 1, more, params_.hidden, params_.workspace, tile) > params_.workspace_bytes) break;
      ++rows;
      entries = more;
    }
    LayOut(rows, entries, params_.hidden, params_.workspace, tile);
    entries = 0;
    for (int64_t i = 0; i < rows; ++i, row = NextValid(row + 1)) {
      tile->indices[i] = row;
      tile->first_entries[i] = entries;
      entries += params_.kept_tokens.size(row);
    }
    if (rows > 0) tile->first_entries[rows] = entries;
    return row;
  }

  std::span<const int32_t> ListOf(int64_t index) const {
    const TokenLists& kept = params_.kept_tokens;
    return {kept.tokens + kept.offsets[index], static_cast<size_t>(kept.size(index))};
  }

  // The row's hidden states, rounded to the weight's type; returns the largest magnitude.
  float TakeStates(int64_t index, float* x) const {
    const int64_t hidden = params_.hidden;
    const char* from =
        static_cast<const char*>(params_.hidden_states) + index * hidden * SizeOf(params_.hidden_type);
    RoundStates(params_.hidden_type, from, params_.weight_type, x, hidden);
    float largest = 0;
    for (int64_t h = 0; h < hidden; ++h) {
      const float magnitude = std::fabs(x[h]);
      largest = std::isfinite(magnitude) ? std::max(largest, magnitude) : kInfinity;
      if (largest == kInfinity) break;
    }
    return largest;
  }

  void ComputeRow(const Tile& tile, int64_t row) const {
    const int64_t index = tile.indices[row];
    const std::span<const int32_t> list = ListOf(index);
    float* x = tile.x + row * params_.hidden;
    float* factors = tile.factors + tile.first_entries[row];
    const float largest = TakeStates(index, x);
    bool fits = std::isfinite(largest);
    if (fits) {
      GatherProducts(weights_, x, list, factors);
      for (size_t i = 0; i < list.size(); ++i) {
        if (params_.bias != nullptr) factors[i] += params_.bias[list[i]];
        factors[i] *= params_.options.logit_scale;
        fits = fits && factors[i] < kInfinity;
      }
    }
    tile.overflowed[row] = !fits || !FinishRow(index, list, largest, factors);
    if (tile.overflowed[row]) FailRow(index);
    if (params_.weight_gradient != WeightGradient::kNone) {
      TokenEntry* entries = tile.entries + tile.first_entries[row];
      for (size_t i = 0; i < list.size(); ++i) {
        // Nothing of a row that overflowed may reach dW.
        entries[i] = {list[i], static_cast<int32_t>(row), tile.overflowed[row] ? 0.0f : factors[i]};
      }
      if (tile.overflowed[row]) std::fill_n(x, params_.hidden, 0.0f);
    }
    if (params_.dx == nullptr || tile.overflowed[row]) return;
    SumGathered(weights_, list, factors, params_.dx_type, InputGradientOf(index));
  }

  char* InputGradientOf(int64_t index) const {
    return static_cast<char*>(params_.dx) + index * params_.hidden * SizeOf(params_.dx_type);
  }

  void FailRow(int64_t index) const {
    params_.losses[index] = kNaN;
    FillReturns(params_.returns, index, kNaN, -1);
    if (params_.dx == nullptr) return;
    char* dx = InputGradientOf(index);
    for (int64_t h = 0; h < params_.hidden; ++h) {
      Convert(DataType::kFloat32, &kNaN, params_.dx_type, dx + h * SizeOf(params_.dx_type), 1);
    }
  }

  ListSums SumList(std::span<const int32_t> list, int64_t label, const float* logits) const {
    const double cap = params_.options.softcap;
    ListSums sums;
    for (size_t i = 0; i < list.size(); ++i) {
      const double s = Cap(logits[i], cap).value;
      if (list[i] == label) sums.label_logit = s;
      const bool is_best = s > sums.largest || (s == sums.largest && list[i] < list[sums.best]);
      if (!is_best) continue;
      sums.largest = s;
      sums.best = static_cast<int64_t>(i);
    }
    for (size_t i = 0; i < list.size(); ++i) {
      const double s = Cap(logits[i], cap).value;
      const double e = std::exp(s - sums.largest);
      (list[i] == label ? sums.own : sums.others) += e;
      if (static_cast<int64_t>(i) != sums.best) sums.rest += e;
      if (e > 0) sums.moment += e * (s - sums.largest);
      sums.above += list[i] != label && s > sums.label_logit ? 1 : 0;
    }
    return sums;
  }

  // False if every logit is -∞, or the row's gradient is so large that sums of many such rows might not be
  // finite. `factors` are logits before the cap, and become what W and x are multiplied by.
  bool FinishRow(int64_t index, std::span<const int32_t> list, float largest, float* factors) const {
    const int64_t label = params_.labels[index];
    const ListSums sums = SumList(list, label, factors);
    if (sums.largest == -kInfinity) return false;
    const LossOptions& options = params_.options;
    const double log_sum_exp = sums.largest + std::log(sums.sum());
    // −log p; near p = 1 from the others alone.
    const double cost =
        sums.own > sums.others ? std::log1p(sums.others / sums.own) : log_sum_exp - sums.label_logit;
    if (WantsGradient() && !FindFactors(index, list, sums, log_sum_exp, largest, factors)) return false;
    const double weight = RowWeight(index);
    const double z_loss = weight * options.lse_square_scale * log_sum_exp * log_sum_exp;
    const double label_loss = weight * ClassWeight(label);
    params_.losses[index] = static_cast<float>((label_loss == 0 ? 0 : label_loss * cost) + z_loss);
    const RowReturns& returns = params_.returns;
    const auto tell = [index](float* array, double value) {
      if (array != nullptr) array[index] = static_cast<float>(value);
    };
    tell(returns.log_sum_exp, log_sum_exp);
    tell(returns.z_loss, z_loss);
    tell(returns.log_probability, -cost);
    tell(returns.entropy, std::log1p(sums.rest) - sums.moment / sums.sum());
    tell(returns.divergence, 0);
    if (returns.prediction != nullptr) returns.prediction[index] = list[sums.best];
    if (returns.target_rank != nullptr) returns.target_rank[index] = sums.above;
    return true;
  }

  bool FindFactors(int64_t index, std::span<const int32_t> list, const ListSums& sums, double log_sum_exp,
                   float largest, float* factors) const {
    const LossOptions& options = params_.options;
    const int64_t label = params_.labels[index];
    const double g = params_.gradient_scale;
    const double g_z = params_.z_gradient_scale.value_or(params_.gradient_scale);
    const double beta = RowWeight(index) * g * ClassWeight(label);
    // α − β: where p_y → 1 nothing else is left, so that it is never made by a subtraction.
    double excess = RowWeight(index) * g_z * 2 * options.lse_square_scale * log_sum_exp;
    if (params_.lse_gradients != nullptr) excess += g * params_.lse_gradients[index];
    const double alpha = beta + excess;
    const double delta = params_.entropy_gradients == nullptr ? 0 : g * params_.entropy_gradients[index];
    const double mean = sums.moment / sums.sum();
    // Σ p |s − μ| is at most twice the entropy.
    const double spread = 2 * std::fabs(delta) * std::log(static_cast<double>(list.size()));
    const double bound = options.logit_scale * std::max({std::fabs(alpha), std::fabs(beta), spread});
    // A bias is as if each row of X ended in a 1.
    const float reach = params_.bias == nullptr ? largest : std::max(largest, 1.0f);
    if (!(bound * reach < kLargestContribution)) return false;
    for (size_t i = 0; i < list.size(); ++i) {
      const Logit logit = Cap(factors[i], options.softcap);
      const double below = logit.value - sums.largest;
      const double p = std::exp(below) / sums.sum();
      double slope = list[i] == label ? excess * p - beta * sums.others / sums.sum() : alpha * p;
      if (delta != 0 && p > 0) slope -= delta * p * (below - mean);
      factors[i] = static_cast<float>(options.logit_scale * logit.slope * slope);
    }
    return true;
  }

  void AddWeightGradient(const Tile& tile) const {
    const std::span<TokenEntry> entries(tile.entries, static_cast<size_t>(tile.first_entries[tile.rows]));
    std::sort(entries.begin(), entries.end());
    AddGathered(entries, tile.x, params_.hidden, params_.dw, params_.bias == nullptr ? nullptr : params_.db);
  }

  bool WantsGradient() const {
    return params_.dx != nullptr || params_.weight_gradient != WeightGradient::kNone;
  }
  double RowWeight(int64_t index) const {
    return params_.token_weights == nullptr ? 1.0 : params_.token_weights[index];
  }
  double ClassWeight(int64_t label) const {
    return params_.class_weights == nullptr ? 1.0 : params_.class_weights[label];
  }

  const LinearCrossEntropyParams& params_;
  LinearCrossEntropyStats& stats_;
  const GatheredWeights weights_;
};

}  // namespace

int64_t KeptWorkspaceBytes(int64_t tokens, int64_t hidden) {
  Tile tile;
  return LayOut(1, tokens, hidden, nullptr, &tile);
}

Status RunKeptTokens(const LinearCrossEntropyParams& params, LinearCrossEntropyStats* stats) {
  return KeptStep(params, stats).Run();
}

}  // namespace lossd::kernels::cpu
