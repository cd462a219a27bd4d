#include "kernels/cpu/row_finish.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/constants.h"
#include "kernels/row_range.h"

namespace lossd::kernels::cpu {
namespace {

// −log p of an entry whose logit and exponential these are. Near p = 1 from the other exponentials alone.
double MinusLogProbability(double logit, double exponential, double sum, double log_sum_exp) {
  const double others = sum - exponential;
  if (exponential <= 0) return log_sum_exp - logit;  // below the range
  return exponential > others ? std::log1p(others / exponential) : std::log(sum / exponential);
}

// Weight 0 means nothing, of an infinite cost too.
double Weighted(double weight, double cost) { return weight == 0 ? 0 : weight * cost; }

}  // namespace

double SumOfClassWeights(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary) {
  if (params.options.label_smoothing == 0) return 0;
  if (params.class_weights == nullptr) return static_cast<double>(vocabulary.entries());
  double sum = 0;
  for (int64_t v = 0; v < vocabulary.entries(); ++v) sum += params.class_weights[v];
  return sum;
}

void FillReturns(const RowReturns& returns, int64_t index, float number, int32_t token) {
  for (float* numbers :
       {returns.log_sum_exp, returns.z_loss, returns.log_probability, returns.entropy, returns.divergence}) {
    if (numbers != nullptr) numbers[index] = number;
  }
  for (int32_t* tokens : {returns.prediction, returns.target_rank}) {
    if (tokens != nullptr) tokens[index] = token;
  }
  if (returns.top_k == 0) return;
  std::fill_n(returns.top_tokens + index * returns.top_k, returns.top_k, token);
  std::fill_n(returns.top_log_probabilities + index * returns.top_k, returns.top_k, number);
}

bool IsDropped(const LinearCrossEntropyParams& params, int64_t row) {
  if (params.labels[row] == params.ignore_index) return true;
  const auto is_zero = [row](const float* values) { return values == nullptr || values[row] == 0; };
  return params.token_weights != nullptr && params.token_weights[row] == 0 && is_zero(params.lse_gradients) &&
         is_zero(params.entropy_gradients) && !params.returns.unweighted();
}

void ClearDroppedRows(const LinearCrossEntropyParams& params) {
  const int64_t dx_row_bytes = params.hidden * SizeOf(params.dx_type);
  for (int64_t r = 0; r < params.tokens; ++r) {
    if (!IsDropped(params, r)) continue;
    params.losses[r] = 0.0f;
    FillReturns(params.returns, r, 0.0f, -1);
    if (params.dx == nullptr) continue;
    std::memset(static_cast<char*>(params.dx) + r * dx_row_bytes, 0, static_cast<size_t>(dx_row_bytes));
  }
}

RowFinish::RowFinish(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary,
                     const SimdKernels& kernels, GradientForm form, double class_weight_sum)
    : params_(params),
      vocabulary_(vocabulary),
      kernels_(kernels),
      form_(form),
      class_weight_sum_(class_weight_sum) {}

RowFactors RowFinish::Finish(const KnownRow& row) const {
  const RowTotals& totals = row.totals;
  const bool ruled_out = totals.sum == 0;  // every logit is -∞
  if (totals.overflowed || ruled_out || (has_teacher() && !row.soft->finite)) {
    return FinishOverflowed(row.index);
  }
  const double log_sum_exp = std::log(totals.sum) + totals.units.exponent * kLn2 + totals.units.offset;
  const double cost =
      MinusLogProbability(totals.target_logit, totals.target_exponential, totals.sum, log_sum_exp);
  const LossOptions& options = params_.options;
  double loss = Weighted((1.0 - options.label_smoothing) * ClassWeight(row.label), cost);
  if (options.label_smoothing > 0) {
    loss += SmoothingCost(totals, cost);
  }
  TargetShares shares;
  if (has_lists()) {
    shares = SharesOf(*row.targets, log_sum_exp);
  } else if (has_teacher()) {
    shares.divergence = row.soft->divergence;
  }
  if (distils()) {
    loss = Weighted(LabelWeight(), loss) + Weighted(params_.distillation.weight, shares.divergence);
  }
  double z_loss = 0;
  if (options.lse_square_scale > 0) {
    z_loss = options.lse_square_scale * log_sum_exp * log_sum_exp;
    loss += z_loss;
  }
  RowFactors factors;
  const SoftPart soft = SoftPartOf(row, shares);
  if (!FindFactors(row, log_sum_exp, soft, &factors)) return FinishOverflowed(row.index);
  if (vocabulary_.answers()) {
    params_.losses[row.index] = static_cast<float>(Weighted(RowWeight(row.index), loss));
    WriteReturns(row, log_sum_exp, cost, z_loss, shares.divergence);
  }
  return factors;
}

void RowFinish::WriteReturns(const KnownRow& row, double log_sum_exp, double cost, double z_loss,
                             double divergence) const {
  const RowReturns& returns = params_.returns;
  const int64_t index = row.index;
  if (returns.log_sum_exp != nullptr) returns.log_sum_exp[index] = static_cast<float>(log_sum_exp);
  if (returns.z_loss != nullptr) returns.z_loss[index] = static_cast<float>(RowWeight(index) * z_loss);
  if (returns.log_probability != nullptr) returns.log_probability[index] = static_cast<float>(-cost);
  if (returns.entropy != nullptr) returns.entropy[index] = static_cast<float>(Entropy(row.totals));
  if (returns.divergence != nullptr && distils()) {
    returns.divergence[index] = static_cast<float>(divergence);
  }
  WriteOrder(row, log_sum_exp);
}

double RowFinish::RowWeight(int64_t index) const {
  return params_.token_weights == nullptr ? 1.0 : params_.token_weights[index];
}

// The cross-entropy's weight.
double RowFinish::LabelWeight() const { return distils() ? params_.distillation.label_weight : 1.0; }

float RowFinish::ClassWeight(int64_t label) const {
  return params_.class_weights == nullptr ? 1.0f : params_.class_weights[label];
}

// (ε/V) Σ C (ℓ − s), through ℓ − s_y: that is exact where logits are so large that ℓ itself is not. A sum
// below fp32's range is infinite, as in plain arithmetic; where s_y is, its C is 0 or the sum is.
double RowFinish::SmoothingCost(const RowTotals& row, double cost) const {
  if (row.weighted_logits < std::numeric_limits<float>::lowest()) return kInfinity;
  const double to_label = row.target_logit * class_weight_sum_ - row.weighted_logits;
  return params_.options.label_smoothing / static_cast<double>(vocabulary_.entries()) *
         (cost * class_weight_sum_ + to_label);
}

// log(S/e) − Σ E (s − m) / S, e that of the largest logit m: two sums of terms of one sign, so that an
// entropy near zero keeps its digits.
double RowFinish::Entropy(const RowTotals& row) const {
  float exponential = row.largest;
  kernels_.exp_row(&exponential, 1, row.units.offset, row.units.exponent);
  return MinusLogProbability(row.largest, exponential, row.sum, 0) - row.moment / row.sum;
}

void RowFinish::WriteOrder(const KnownRow& row, double log_sum_exp) const {
  const RowReturns& returns = params_.returns;
  const RowTotals& totals = row.totals;
  if (returns.target_rank != nullptr) returns.target_rank[row.index] = totals.above;
  if (returns.prediction != nullptr) returns.prediction[row.index] = row.top[0].token;
  if (returns.top_k == 0) return;
  std::array<float, kMostTopK> exponentials;
  for (int32_t i = 0; i < returns.top_k; ++i) exponentials[i] = row.top[i].logit;
  kernels_.exp_row(exponentials.data(), returns.top_k, totals.units.offset, totals.units.exponent);
  const int64_t first = row.index * returns.top_k;
  for (int32_t i = 0; i < returns.top_k; ++i) {
    returns.top_tokens[first + i] = row.top[i].token;
    returns.top_log_probabilities[first + i] =
        static_cast<float>(-MinusLogProbability(row.top[i].logit, exponentials[i], totals.sum, log_sum_exp));
  }
}

// δ: what the row's entropy is multiplied by.
double RowFinish::EntropyGradient(int64_t index) const {
  if (params_.entropy_gradients == nullptr) return 0;
  return static_cast<double>(params_.gradient_scale) * params_.entropy_gradients[index];
}

RowFinish::SoftPart RowFinish::SoftPartOf(const KnownRow& row, const TargetShares& shares) const {
  SoftPart soft;
  if (!distils()) return soft;
  soft.factor = RowWeight(row.index) * params_.gradient_scale * params_.distillation.weight /
                params_.distillation.temperature;
  if (has_teacher()) {
    soft.reach = std::fabs(soft.factor) * row.soft->reach;
    soft.label = soft.factor * row.soft->label_slope;
    return soft;
  }
  const double p = row.totals.target_exponential / row.totals.sum;
  soft.others = soft.factor * shares.others;
  soft.listed = soft.factor * shares.listed;
  const TargetSums& sums = *row.targets;
  soft.label = sums.has_own ? soft.listed * p - soft.factor * sums.own : soft.others * p;
  // Those of the list at most Σ q p and Σ q, of the others R p / P and p.
  soft.reach = 4 * std::fabs(soft.factor);
  return soft;
}

// False if the row's gradient is so large that sums of many such rows might not be finite.
bool RowFinish::FindFactors(const KnownRow& row, double log_sum_exp, const SoftPart& soft,
                            RowFactors* factors) const {
  const RowTotals& totals = row.totals;
  const LossOptions& options = params_.options;
  const double scale = params_.gradient_scale;
  const double z_scale = params_.z_gradient_scale.value_or(params_.gradient_scale);
  const double row_weight = RowWeight(row.index);
  const double smoothing = options.label_smoothing / static_cast<double>(vocabulary_.entries());
  const double labelled = row_weight * scale * LabelWeight();
  const double beta = labelled * (1.0 - options.label_smoothing) * ClassWeight(row.label);
  const double gamma = labelled * smoothing;
  // α − β is what the label's factor keeps where p_y → 1: it is never made by a subtraction.
  double excess = gamma * class_weight_sum_;
  if (options.lse_square_scale > 0) {
    excess += row_weight * z_scale * 2 * options.lse_square_scale * log_sum_exp;
  }
  if (params_.lse_gradients != nullptr) excess += scale * params_.lse_gradients[row.index];
  const double alpha = beta + excess;

  const double own = totals.target_exponential;
  double label = -beta * ((totals.sum - own) / totals.sum);
  if (excess != 0) label += excess * (own / totals.sum);
  const double delta = EntropyGradient(row.index);
  const double mean = delta == 0 ? 0 : totals.moment / totals.sum;
  double entropy_reach = 0;
  if (delta != 0) {
    const double below = static_cast<double>(totals.largest) - totals.target_logit;
    if (own > 0) label += delta * (own / totals.sum) * (below + mean);
    // Σ p |s − μ| is at most twice the entropy.
    entropy_reach = 2 * std::fabs(delta) * std::log(static_cast<double>(vocabulary_.entries()));
  }
  double factor = options.logit_scale;
  label += soft.label;
  factors->numerator = factor * (alpha + soft.others);
  // A segment's own scale is no larger.
  float largest_scale = static_cast<float>(factors->numerator / totals.smallest_sum);
  if (form_ != GradientForm::kExponentials) {
    label -= gamma * ClassWeight(row.label);
    // Divided by their size here, so that the values in the tile are about as large as p.
    const double size = std::fabs(alpha) + std::fabs(gamma) + std::fabs(soft.factor) + std::fabs(delta);
    factors->scale = largest_scale = static_cast<float>(factor * size);
    factors->numerator = size > 0 ? (alpha + soft.others) / size : 0.0;
    factors->listed_numerator = size > 0 ? (alpha + soft.listed) / size : 0.0;
    factors->target = size > 0 ? static_cast<float>(soft.factor / size) : 0.0f;
    factors->level = size > 0 ? static_cast<float>(gamma / size) : 0.0f;
    factors->spread = size > 0 ? delta / size : 0.0;
    factors->largest = totals.largest;
    factors->mean = static_cast<float>(mean);
    if (has_teacher()) row.soft->factor = factors->target;
  }
  const double bound = factor * std::max({std::fabs(alpha), std::fabs(beta),
                                          std::fabs(gamma) * class_weight_sum_, soft.reach, entropy_reach});
  if (options.softcap > 0) factor *= totals.label_factor;
  factors->target_gradient = static_cast<float>(factor * label);
  factors->weightless = largest_scale == 0 && factors->target_gradient == 0;
  if (params_.dx == nullptr && params_.dw == nullptr) return true;
  // A bias is as if each row of X ended in a 1.
  const float largest = params_.bias == nullptr ? row.largest : std::max(row.largest, 1.0f);
  return std::isfinite(factors->target_gradient) && bound * largest < kLargestContribution &&
         std::fabs(largest_scale) * largest < kLargestScaledRow;
}

// Its loss and dX say so; nothing of it may reach dW, where 0 * NaN would spoil every other row's work.
RowFactors RowFinish::FinishOverflowed(int64_t index) const {
  if (vocabulary_.answers()) {
    params_.losses[index] = kNaN;
    FillReturns(params_.returns, index, kNaN, -1);
  }
  return {.overflowed = true};
}

}  // namespace lossd::kernels::cpu
