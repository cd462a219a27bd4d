// The oracle: textbook formulas in fp64. Kept so plain that it can be checked by eye; tests hold it against
// finite differences.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/linear_cross_entropy.h"
#include "kernels/reference_divergence.h"
#include "kernels/validate.h"

namespace lossd::kernels {
namespace {

std::vector<double> Widen(DataType type, const void* values, int64_t count) {
  std::vector<float> single(static_cast<size_t>(count));
  Convert(type, values, DataType::kFloat32, single.data(), count);
  return {single.begin(), single.end()};
}

double Product(const double* a, const double* b, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

double Capped(double z, double cap) { return cap > 0 ? cap * std::tanh(z / cap) : z; }

// The terms that all rows share.
struct Terms {
  const LinearCrossEntropyParams& params;
  const std::vector<double> weight;          // [V, H]
  const std::vector<double> teacher_weight;  // [V, its H], or empty
  double class_weight_sum = 0;               // ΣC

  explicit Terms(const LinearCrossEntropyParams& p)
      : params(p),
        weight(Widen(p.weight_type, p.weight, p.vocab * p.hidden)),
        teacher_weight(p.teacher == nullptr
                           ? std::vector<double>()
                           : Widen(p.teacher->weight_type, p.teacher->weight, p.vocab * p.teacher->hidden)) {
    for (int64_t v = 0; v < p.vocab; ++v) class_weight_sum += ClassWeight(v);
  }
  double ClassWeight(int64_t v) const {
    return params.class_weights == nullptr ? 1.0 : params.class_weights[v];
  }
  // The factor of the cross-entropy.
  bool Distils() const { return params.teacher != nullptr || params.target_lists.given(); }
  double LabelWeight() const { return Distils() ? params.distillation.label_weight : 1.0; }

  std::vector<double> TeacherLogits(int64_t row) const {
    const Teacher& teacher = *params.teacher;
    const int64_t row_bytes = teacher.hidden * SizeOf(teacher.hidden_type);
    const char* states = static_cast<const char*>(teacher.hidden_states) + row * row_bytes;
    const std::vector<double> x = Widen(teacher.hidden_type, states, teacher.hidden);
    std::vector<double> logits(static_cast<size_t>(params.vocab));
    for (int64_t v = 0; v < params.vocab; ++v) {
      double sum = Product(&teacher_weight[v * teacher.hidden], x.data(), teacher.hidden);
      if (teacher.bias != nullptr) sum += teacher.bias[v];
      logits[v] = Capped(teacher.logit_scale * sum, teacher.softcap);
    }
    return logits;
  }
};

// One row: its softmax, then the loss and its gradients as docs/numerics.md has them.
class Row {
 public:
  Row(const Terms& terms, std::vector<double> x, int64_t index)
      : terms_(terms), x_(std::move(x)), index_(index), label_(terms.params.labels[index]) {
    const LinearCrossEntropyParams& params = terms.params;
    logits_.resize(params.vocab);
    for (int64_t v = 0; v < params.vocab; ++v) {
      double sum = Product(&terms.weight[v * params.hidden], x_.data(), params.hidden);
      if (params.bias != nullptr) sum += params.bias[v];
      logits_[v] = Capped(params.options.logit_scale * sum, params.options.softcap);
    }
    DropOthers(params.kept_tokens);
    const double largest = *std::max_element(logits_.begin(), logits_.end());
    // The sum over all but the label's own term, so that a loss near zero keeps its digits.
    for (int64_t v = 0; v < params.vocab; ++v) {
      if (v != label_) others_ += std::exp(logits_[v] - largest);
    }
    own_ = std::exp(logits_[label_] - largest);
    log_sum_exp_ = largest + std::log(others_ + own_);
    if (params.target_lists.given()) CompareWithTargets(params.target_lists);
    if (params.teacher == nullptr) return;
    divergence_ = DivergenceOf(params.distillation, logits_, terms.TeacherLogits(index));
  }

  double log_sum_exp() const { return log_sum_exp_; }
  double log_probability() const {
    return own_ > others_ ? -std::log1p(others_ / own_) : logits_[label_] - log_sum_exp_;
  }
  double z_loss() const {
    return TokenWeight() * terms_.params.options.lse_square_scale * log_sum_exp_ * log_sum_exp_;
  }
  double loss() const {
    double smoothing = 0;
    const double epsilon = terms_.params.options.label_smoothing;
    for (int64_t v = 0; epsilon > 0 && v < terms_.params.vocab; ++v) {
      smoothing += terms_.ClassWeight(v) * (log_sum_exp_ - logits_[v]);
    }
    const double cost = (1 - epsilon) * terms_.ClassWeight(label_) * -log_probability() +
                        epsilon / static_cast<double>(terms_.params.vocab) * smoothing;
    const double soft =
        terms_.Distils() ? static_cast<double>(terms_.params.distillation.weight) * divergence() : 0.0;
    return TokenWeight() * (terms_.LabelWeight() * cost + soft) + z_loss();
  }
  double divergence() const { return divergence_.value; }
  double entropy() const {
    double sum = 0;
    for (const double logit : logits_) {
      if (logit != kDropped) sum += std::exp(logit - log_sum_exp_) * (log_sum_exp_ - logit);
    }
    return sum;
  }
  const std::vector<double>& logits() const { return logits_; }

  void Gradients(double* dx, double* dw, double* db) const {
    const LinearCrossEntropyParams& params = terms_.params;
    const double g = params.gradient_scale;
    const double g_z = params.z_gradient_scale.value_or(params.gradient_scale);
    const double epsilon = params.options.label_smoothing;
    const double upstream = params.lse_gradients == nullptr ? 0.0 : params.lse_gradients[index_];
    const double labelled = TokenWeight() * g * terms_.LabelWeight();
    const double beta = labelled * (1 - epsilon) * terms_.ClassWeight(label_);
    const double gamma = labelled * epsilon / static_cast<double>(params.vocab);
    const double alpha = beta + gamma * terms_.class_weight_sum +
                         2 * TokenWeight() * params.options.lse_square_scale * log_sum_exp_ * g_z +
                         g * upstream;
    const double of_entropy =
        params.entropy_gradients == nullptr ? 0.0 : g * params.entropy_gradients[index_];
    const double mean = log_sum_exp_ - entropy();  // Σ p s
    const double sum = others_ + own_;
    for (int64_t v = 0; v < params.vocab; ++v) {
      if (logits_[v] == kDropped) continue;
      const double p = std::exp(logits_[v] - log_sum_exp_);
      // α p_y − β without the difference of two nearly equal numbers.
      const double ds = v == label_ ? (alpha - beta) * own_ / sum - beta * others_ / sum : alpha * p;
      double of_logit = ds - gamma * terms_.ClassWeight(v);
      if (of_entropy != 0) of_logit -= of_entropy * p * (logits_[v] - mean);
      if (terms_.Distils()) {
        of_logit += TokenWeight() * g * params.distillation.weight * divergence_.slopes[v];
      }
      const double dz = params.options.logit_scale * Slope(logits_[v]) * of_logit;
      const double* w = &terms_.weight[v * params.hidden];
      if (dx != nullptr) {
        for (int64_t h = 0; h < params.hidden; ++h) dx[h] += dz * w[h];
      }
      if (dw != nullptr) {
        for (int64_t h = 0; h < params.hidden; ++h) dw[v * params.hidden + h] += dz * x_[h];
      }
      if (db != nullptr) db[v] += dz;
    }
  }

 private:
  static constexpr double kDropped = -std::numeric_limits<double>::infinity();

  // Logits that are not of the row's list, if there are lists.
  void DropOthers(const TokenLists& kept) {
    if (!kept.given()) return;
    std::vector<double> listed(logits_.size(), kDropped);
    for (int64_t i = kept.offsets[index_]; i < kept.offsets[index_ + 1]; ++i) {
      listed[kept.tokens[i]] = logits_[kept.tokens[i]];
    }
    logits_ = std::move(listed);
  }
  // D = Σ q log(q / p) + R log(R / P), R and P what the list leaves of 1 and of the row's own distribution.
  // The logarithm of a P below its least is that of the tangent there.
  void CompareWithTargets(const TargetLists& targets) {
    std::vector<double> target(logits_.size());
    std::vector<bool> listed(logits_.size());
    double mass = 0;
    for (int64_t i = targets.lists.offsets[index_]; i < targets.lists.offsets[index_ + 1]; ++i) {
      const int32_t token = targets.lists.tokens[i];
      const double q = targets.probabilities[i];
      listed[token] = true;
      target[token] = q;
      mass += q;
      if (q > 0) divergence_.value += q * (std::log(q) - logits_[token] + log_sum_exp_);
    }
    double left = 0;
    for (size_t v = 0; v < logits_.size(); ++v) left += listed[v] ? 0 : std::exp(logits_[v] - log_sum_exp_);
    const double rest = RestOfTargets(mass);
    const double least = LeastRest(log_sum_exp_);
    const double log_left = left > least ? std::log(left) : std::log(least) + left / least - 1;
    if (rest > 0) divergence_.value += rest * (std::log(rest) - log_left);
    // P is the sum of others' p, whose slopes are p (1 - P), and -p P of a token of the list.
    const double of_left = rest / std::max(left, least);
    divergence_.slopes.resize(logits_.size());
    for (size_t v = 0; v < logits_.size(); ++v) {
      const double p = std::exp(logits_[v] - log_sum_exp_);
      divergence_.slopes[v] = mass * p - target[v] - of_left * p * ((listed[v] ? 0 : 1) - left);
    }
  }
  double Slope(double s) const {
    const double cap = terms_.params.options.softcap;
    return cap > 0 ? 1 - (s / cap) * (s / cap) : 1.0;
  }
  double TokenWeight() const {
    return terms_.params.token_weights == nullptr ? 1.0 : terms_.params.token_weights[index_];
  }

  const Terms& terms_;
  const std::vector<double> x_;
  const int64_t index_;
  const int64_t label_;
  std::vector<double> logits_;
  double others_ = 0;
  double own_ = 0;
  double log_sum_exp_ = 0;
  ReferenceDivergence divergence_;
};

}  // namespace

Status ReferenceLinearCrossEntropy(const LinearCrossEntropyParams& params, const ReferenceOutputs& outputs) {
  if (const Status status = ValidateInputs(params); status != Status::kOk) return status;
  const auto put = [](double* array, int64_t index, double value) {
    if (array != nullptr) array[index] = value;
  };
  const int64_t hidden = params.hidden;
  const Terms terms(params);
  for (int64_t r = 0; r < params.tokens; ++r) {
    double* dx = outputs.dx == nullptr ? nullptr : outputs.dx + r * hidden;
    double* logits = outputs.logits == nullptr ? nullptr : outputs.logits + r * params.vocab;
    if (dx != nullptr) std::fill_n(dx, hidden, 0.0);
    if (logits != nullptr) std::fill_n(logits, params.vocab, 0.0);
    for (double* array : {outputs.losses, outputs.log_sum_exp, outputs.z_loss, outputs.log_probability,
                          outputs.entropy, outputs.divergence}) {
      put(array, r, 0.0);
    }
    if (params.labels[r] == params.ignore_index) continue;
    const char* x = static_cast<const char*>(params.hidden_states) + r * hidden * SizeOf(params.hidden_type);
    const Row row(terms, Widen(params.hidden_type, x, hidden), r);
    put(outputs.losses, r, row.loss());
    put(outputs.log_sum_exp, r, row.log_sum_exp());
    put(outputs.z_loss, r, row.z_loss());
    put(outputs.log_probability, r, row.log_probability());
    put(outputs.entropy, r, row.entropy());
    put(outputs.divergence, r, row.divergence());
    if (logits != nullptr) std::copy(row.logits().begin(), row.logits().end(), logits);
    row.Gradients(dx, outputs.dw, outputs.db);
  }
  return Status::kOk;
}

}  // namespace lossd::kernels
