// The oracle: textbook formulas in fp64. Kept so plain that it can be checked by eye; tests hold it against
// finite differences.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/linear_cross_entropy.h"
#include "kernels/validate.h"

namespace lossd::kernels {
namespace {

double Element(DataType type, const void* values, int64_t index) {
  float value = 0;
  Convert(type, static_cast<const char*>(values) + index * SizeOf(type), DataType::kFloat32, &value, 1);
  return value;
}

std::vector<double> Widen(DataType type, const void* values, int64_t count) {
  std::vector<double> wide(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) wide[i] = Element(type, values, i);
  return wide;
}

// One row: z = W x, loss = logsumexp(z) - z[label], and the gradients of g * loss.
class Row {
 public:
  Row(const std::vector<double>& weight, std::vector<double> x, int64_t label)
      : weight_(weight), x_(std::move(x)), label_(label), hidden_(static_cast<int64_t>(x_.size())) {
    const int64_t vocab = static_cast<int64_t>(weight.size()) / hidden_;
    logits_.resize(vocab);
    double largest = -HUGE_VAL;
    for (int64_t v = 0; v < vocab; ++v) {
      double sum = 0;
      for (int64_t h = 0; h < hidden_; ++h) sum += weight_[v * hidden_ + h] * x_[h];
      logits_[v] = sum;
      largest = std::fmax(largest, sum);
    }
    // The sum over all but the label's own term, so that a loss near zero keeps its digits.
    double others = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      if (v != label_) others += std::exp(logits_[v] - largest);
    }
    const double own = std::exp(logits_[label_] - largest);
    log_sum_exp_ = largest + std::log(others + own);
    loss_ = own > others ? std::log1p(others / own) : log_sum_exp_ - logits_[label_];
    label_gradient_ = -others / (others + own);  // p_y - 1
  }

  double loss() const { return loss_; }
  double log_sum_exp() const { return log_sum_exp_; }

  void Gradients(double scale, double* dx, double* dw) const {
    for (int64_t v = 0; v < static_cast<int64_t>(logits_.size()); ++v) {
      const double p = std::exp(logits_[v] - log_sum_exp_);
      const double dz = scale * (v == label_ ? label_gradient_ : p);
      for (int64_t h = 0; h < hidden_; ++h) {
        if (dx != nullptr) dx[h] += dz * weight_[v * hidden_ + h];
        if (dw != nullptr) dw[v * hidden_ + h] += dz * x_[h];
      }
    }
  }

 private:
  const std::vector<double>& weight_;
  const std::vector<double> x_;
  const int64_t label_;
  const int64_t hidden_;
  std::vector<double> logits_;
  double log_sum_exp_ = 0;
  double loss_ = 0;
  double label_gradient_ = 0;
};

}  // namespace

Status ReferenceLinearCrossEntropy(const LinearCrossEntropyParams& params, const ReferenceOutputs& outputs) {
  if (const Status status = ValidateInputs(params); status != Status::kOk) return status;
  const int64_t hidden = params.hidden;
  const std::vector<double> weight = Widen(params.weight_type, params.weight, params.vocab * hidden);
  for (int64_t r = 0; r < params.tokens; ++r) {
    double* dx = outputs.dx == nullptr ? nullptr : outputs.dx + r * hidden;
    if (dx != nullptr) std::fill(dx, dx + hidden, 0.0);
    const bool ignored = params.labels[r] == params.ignore_index;
    double loss = 0;
    double log_sum_exp = 0;
    if (!ignored) {
      const char* x =
          static_cast<const char*>(params.hidden_states) + r * hidden * SizeOf(params.hidden_type);
      const Row row(weight, Widen(params.hidden_type, x, hidden), params.labels[r]);
      loss = row.loss();
      log_sum_exp = row.log_sum_exp();
      row.Gradients(params.gradient_scale, dx, outputs.dw);
    }
    if (outputs.losses != nullptr) outputs.losses[r] = loss;
    if (outputs.log_sum_exp != nullptr) outputs.log_sum_exp[r] = log_sum_exp;
  }
  return Status::kOk;
}

}  // namespace lossd::kernels
