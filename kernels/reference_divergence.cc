#include "kernels/reference_divergence.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace lossd::kernels {
namespace {

std::vector<double> LogSoftmax(std::vector<double> logits, double temperature) {
  for (double& logit : logits) logit /= temperature;
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - largest);
  for (double& logit : logits) logit -= largest + std::log(sum);
  return logits;
}

// Σ a log(a / b).
double RelativeEntropy(const std::vector<double>& log_a, const std::vector<double>& log_b) {
  double sum = 0;
  for (size_t v = 0; v < log_a.size(); ++v) sum += std::exp(log_a[v]) * (log_a[v] - log_b[v]);
  return sum;
}

// log(β p + (1 − β) q).
std::vector<double> LogMixture(const std::vector<double>& log_p, const std::vector<double>& log_q,
                               double beta) {
  std::vector<double> log_m(log_p.size());
  for (size_t v = 0; v < log_p.size(); ++v) {
    const double larger = std::max(log_p[v], log_q[v]);
    log_m[v] =
        larger + std::log(beta * std::exp(log_p[v] - larger) + (1 - beta) * std::exp(log_q[v] - larger));
  }
  return log_m;
}

}  // namespace

ReferenceDivergence DivergenceOf(const Distillation& options, const std::vector<double>& logits,
                                 const std::vector<double>& teacher_logits) {
  const std::vector<double> log_q = LogSoftmax(logits, options.temperature);
  const std::vector<double> log_p = LogSoftmax(teacher_logits, options.temperature);
  ReferenceDivergence result;
  result.slopes.resize(logits.size());
  const auto fill = [&](const auto& slope) {
    for (size_t v = 0; v < logits.size(); ++v) {
      result.slopes[v] = slope(v, std::exp(log_q[v])) / static_cast<double>(options.temperature);
    }
  };
  switch (options.divergence) {
    case Divergence::kForwardKl:
      result.value = RelativeEntropy(log_p, log_q);
      fill([&](size_t v, double q) { return q - std::exp(log_p[v]); });
      break;
    case Divergence::kReverseKl:
      result.value = RelativeEntropy(log_q, log_p);
      fill([&](size_t v, double q) { return q * (log_q[v] - log_p[v] - result.value); });
      break;
    case Divergence::kJensenShannon: {
      const double beta = options.beta;
      const std::vector<double> log_m = LogMixture(log_p, log_q, beta);
      const double of_student = RelativeEntropy(log_q, log_m);
      result.value = beta * RelativeEntropy(log_p, log_m) + (1 - beta) * of_student;
      fill([&](size_t v, double q) { return (1 - beta) * q * (log_q[v] - log_m[v] - of_student); });
      break;
    }
  }
  return result;
}

}  // namespace lossd::kernels
