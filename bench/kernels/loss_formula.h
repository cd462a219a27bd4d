// The loss with its options in fp64, row by row, as docs/numerics.md has it; without class weights.
#ifndef LOSSD_BENCH_KERNELS_LOSS_FORMULA_H_
#define LOSSD_BENCH_KERNELS_LOSS_FORMULA_H_

#include <cmath>
#include <cstdint>

#include "kernels/linear_cross_entropy.h"

namespace lossd::bench {

struct LossFormula {
  kernels::LossOptions options;
  int64_t vocab = 0;
  double gradient_scale = 1.0;

  // The logit that x·W_v gives.
  double Logit(double product) const {
    const double z = options.logit_scale * product;
    return options.softcap > 0 ? options.softcap * std::tanh(z / options.softcap) : z;
  }

  double Loss(double log_sum_exp, double sum_of_logits, double label_logit) const {
    const double epsilon = options.label_smoothing;
    const double entries = static_cast<double>(vocab);
    return (1 - epsilon) * (log_sum_exp - label_logit) + epsilon * (log_sum_exp - sum_of_logits / entries) +
           options.lse_square_scale * log_sum_exp * log_sum_exp;
  }

  // The gradient by x·W_v, for an entry with this logit.
  double Gradient(double log_sum_exp, double logit, bool is_label) const {
    const double epsilon = options.label_smoothing;
    const double alpha = 1 + 2 * options.lse_square_scale * log_sum_exp;
    const double by_logit = alpha * std::exp(logit - log_sum_exp) - (is_label ? 1 - epsilon : 0) -
                            epsilon / static_cast<double>(vocab);
    return Times(by_logit, logit);
  }

  // What an upstream gradient of the row's entropy adds to that: mean is that of the logits, by p.
  double EntropyGradient(double gradient, double log_sum_exp, double mean, double logit) const {
    return Times(-gradient * std::exp(logit - log_sum_exp) * (logit - mean), logit);
  }

  // Turns the gradient by an entry's logit into the gradient by x·W_v.
  double Times(double by_logit, double logit) const {
    const double share = options.softcap > 0 ? logit / options.softcap : 0;
    return gradient_scale * by_logit * (1 - share * share) * options.logit_scale;
  }
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_LOSS_FORMULA_H_
