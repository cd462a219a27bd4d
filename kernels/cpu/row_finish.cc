#include "kernels/cpu/row_finish.h"

#include <algorithm>
#include <array>
#include <cmath>

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

double SumOfClassWeights(const LinearCrossEntropyParams& params) {
  if (params.options.label_smoothing == 0) return 0;
  if (params.class_weights == nullptr) return static_cast<double>(params.vocab);
  double sum = 0;
  for (int64_t v = 0; v < params.vocab; ++v) sum += params.class_weights[v];
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

RowFinish::RowFinish(const LinearCrossEntropyParams& params, const SimdKernels& kernels,
                     const Workspace& tile, GradientForm form, double class_weight_sum,
                     const SoftTargets* soft)
    : params_(params),
      kernels_(kernels),
      tile_(tile),
      form_(form),
      class_weight_sum_(class_weight_sum),
      soft_(soft) {}

void RowFinish::Finish(int64_t r) const {
  RowState& row = tile_.row_states[r];
  if (row.overflowed || (soft_ != nullptr && !soft_->row(r).finite)) return FinishOverflowed(r);
  const double log_sum_exp = std::log(row.sum) + row.exponent * kLn2 + row.offset;
  const double cost = MinusLogProbability(row.target_logit, row.target_exponential, row.sum, log_sum_exp);
  const LossOptions& options = params_.options;
  double loss = Weighted((1.0 - options.label_smoothing) * ClassWeight(row.label), cost);
  if (options.label_smoothing > 0) {
    const double smoothing = SmoothingCost(r, cost);
    if (!std::isfinite(smoothing)) return FinishOverflowed(r);  // a logit is -∞
    loss += smoothing;
  }
  if (soft_ != nullptr) {
    const double weight = soft_->options().weight;
    loss = Weighted(LabelWeight(), loss) + Weighted(weight, soft_->row(r).divergence);
  }
  const double row_weight = RowWeight(row.index);
  double z_loss = 0;
  if (options.lse_square_scale > 0) {
    z_loss = options.lse_square_scale * log_sum_exp * log_sum_exp;
    loss += z_loss;
  }
  params_.losses[row.index] = static_cast<float>(Weighted(row_weight, loss));

  const RowReturns& returns = params_.returns;
  if (returns.log_sum_exp != nullptr) returns.log_sum_exp[row.index] = static_cast<float>(log_sum_exp);
  if (returns.z_loss != nullptr) returns.z_loss[row.index] = static_cast<float>(row_weight * z_loss);
  if (returns.log_probability != nullptr) returns.log_probability[row.index] = static_cast<float>(-cost);
  if (returns.entropy != nullptr) returns.entropy[row.index] = static_cast<float>(Entropy(r));
  if (returns.divergence != nullptr && soft_ != nullptr) {
    returns.divergence[row.index] = static_cast<float>(soft_->row(r).divergence);
  }
  WriteOrder(r, log_sum_exp);
  if (!SetFactors(r, log_sum_exp)) FinishOverflowed(r);
}

double RowFinish::RowWeight(int64_t index) const {
  return params_.token_weights == nullptr ? 1.0 : params_.token_weights[index];
}

// The cross-entropy's weight.
double RowFinish::LabelWeight() const { return soft_ == nullptr ? 1.0 : soft_->options().label_weight; }

float RowFinish::ClassWeight(int64_t label) const {
  return params_.class_weights == nullptr ? 1.0f : params_.class_weights[label];
}

// (ε/V) Σ C (ℓ − s), through ℓ − s_y: that is exact where logits are so large that ℓ itself is not.
double RowFinish::SmoothingCost(int64_t r, double cost) const {
  double weighted_logits = 0;
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    weighted_logits += tile_.Detail(block, r).weighted_logits;
  }
  const double to_label = tile_.row_states[r].target_logit * class_weight_sum_ - weighted_logits;
  return params_.options.label_smoothing / static_cast<double>(params_.vocab) *
         (cost * class_weight_sum_ + to_label);
}

// log(S/e) − Σ E (s − m) / S, e that of the largest logit m: two sums of terms of one sign, so that an
// entropy near zero keeps its digits.
double RowFinish::Entropy(int64_t r) const {
  const RowState& row = tile_.row_states[r];
  float largest = tile_.Detail(0, r).largest;
  for (int64_t block = 1; block < tile_.blocks; ++block) {
    largest = std::max(largest, tile_.Detail(block, r).largest);
  }
  double moment = 0;
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    const BlockDetail& detail = tile_.Detail(block, r);
    const double sum = tile_.BlockValue(block, r);
    if (sum > 0) moment += detail.moment - (static_cast<double>(largest) - detail.largest) * sum;
  }
  float exponential = largest;
  kernels_.exp_row(&exponential, 1, row.offset, row.exponent);
  return MinusLogProbability(largest, exponential, row.sum, 0) - moment / row.sum;
}

void RowFinish::WriteOrder(int64_t r, double log_sum_exp) const {
  const RowState& row = tile_.row_states[r];
  const RowReturns& returns = params_.returns;
  if (returns.target_rank != nullptr) returns.target_rank[row.index] = tile_.row_details[r].above;
  if (returns.prediction == nullptr && returns.top_k == 0) return;
  const int32_t* tokens = tile_.top_tokens + r * kMostTopK;
  if (returns.prediction != nullptr) returns.prediction[row.index] = tokens[0];
  if (returns.top_k == 0) return;
  const float* logits = tile_.top_logits + r * kMostTopK;
  std::array<float, kMostTopK> exponentials;
  std::copy_n(logits, returns.top_k, exponentials.begin());
  kernels_.exp_row(exponentials.data(), returns.top_k, row.offset, row.exponent);
  const int64_t first = row.index * returns.top_k;
  for (int32_t i = 0; i < returns.top_k; ++i) {
    returns.top_tokens[first + i] = tokens[i];
    returns.top_log_probabilities[first + i] =
        static_cast<float>(-MinusLogProbability(logits[i], exponentials[i], row.sum, log_sum_exp));
  }
}

// False if the row's gradient is so large that sums of many such rows might not be finite.
bool RowFinish::SetFactors(int64_t r, double log_sum_exp) const {
  RowState& row = tile_.row_states[r];
  const LossOptions& options = params_.options;
  const double scale = params_.gradient_scale;
  const double z_scale = params_.z_gradient_scale.value_or(params_.gradient_scale);
  const double row_weight = RowWeight(row.index);
  const double smoothing = options.label_smoothing / static_cast<double>(params_.vocab);
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

  const double own = row.target_exponential;
  double label = -beta * ((row.sum - own) / row.sum);
  if (excess != 0) label += excess * (own / row.sum);
  double factor = options.logit_scale;
  // The factor of the divergence's slopes times T.
  double soft = 0;
  double soft_reach = 0;
  if (soft_ != nullptr) {
    const Distillation& distillation = soft_->options();
    soft = row_weight * scale * distillation.weight / distillation.temperature;
    soft_reach = std::fabs(soft) * soft_->row(r).reach;
    label += soft * soft_->row(r).label_slope;
  }
  row.scale = static_cast<float>(factor * alpha / row.sum);
  if (form_ != GradientForm::kExponentials) {
    RowDetail& detail = tile_.row_details[r];
    label -= gamma * ClassWeight(row.label);
    // Divided by their size here, so that the values in the tile are about as large as p.
    const double size = std::fabs(alpha) + std::fabs(gamma) + std::fabs(soft);
    row.scale = static_cast<float>(factor * size);
    detail.slope = size > 0 ? static_cast<float>(alpha / size / row.sum) : 0.0f;
    detail.level = size > 0 ? static_cast<float>(gamma / size) : 0.0f;
    if (soft_ != nullptr) soft_->row(r).factor = size > 0 ? static_cast<float>(soft / size) : 0.0f;
  }
  const double bound = factor * std::max({std::fabs(alpha), std::fabs(beta),
                                          std::fabs(gamma) * class_weight_sum_, soft_reach});
  if (options.softcap > 0) factor *= tile_.row_details[r].label_factor;
  row.target_gradient = static_cast<float>(factor * label);
  if (params_.dx == nullptr && params_.dw == nullptr) return true;
  // A bias is as if each row of X ended in a 1.
  const double largest = params_.bias == nullptr ? row.largest : std::max(row.largest, 1.0f);
  return std::isfinite(row.target_gradient) && bound * largest < kLargestContribution &&
         std::fabs(row.scale) * largest < kLargestScaledRow;
}

// Its loss and dX say so; nothing of it may reach dW, where 0 * NaN would spoil every other row's work.
void RowFinish::FinishOverflowed(int64_t r) const {
  RowState& row = tile_.row_states[r];
  row.overflowed = true;
  row.scale = 0.0f;
  row.target_gradient = 0.0f;
  params_.losses[row.index] = kNaN;
  FillReturns(params_.returns, row.index, kNaN, -1);
}

}  // namespace lossd::kernels::cpu
