// A logit as gathered products have it, in fp64.
#ifndef LOSSD_KERNELS_CPU_GATHERED_CAPPED_LOGIT_H_
#define LOSSD_KERNELS_CPU_GATHERED_CAPPED_LOGIT_H_

#include <cmath>

namespace lossd::kernels::cpu {

// s and its derivative by the product's sum times the scale. With a softcap by w = 1 / (e^(2|z|/c) + 1),
// which keeps the digits of a derivative near 0.
struct Logit {
  double value = 0;
  double slope = 1;
};
inline Logit Cap(double z, double cap) {
  if (cap == 0) return {z, 1};
  const double w = 1 / (std::exp(2 * std::fabs(z) / cap) + 1);
  return {cap * std::tanh(z / cap), 4 * w * (1 - w)};
}

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_GATHERED_CAPPED_LOGIT_H_
