// What soft targets on a list make of a row, once its log-sum-exp is known: for hosts and devices. Formulas:
// docs/numerics.md, "Soft targets on a list".
#ifndef LOSSD_KERNELS_TARGET_SHARES_H_
#define LOSSD_KERNELS_TARGET_SHARES_H_

#include <cmath>

#include "kernels/host_device.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels {

// What a row's list adds up to. 0 log 0 is 0.
struct TargetSums {
  double mass = 0;         // Σ q
  double cross = 0;        // Σ q s
  double negentropy = 0;   // Σ q log q
  double log_sum_exp = 0;  // of the list's s alone; -infinity without any
  float own = 0;           // q of the label
  bool has_own = false;    // whether the list has it
  bool has_all = false;    // whether the list has every token
};

// D, and its gradient: listed p - q for a token of the list, others p for any other.
struct TargetShares {
  double divergence = 0;
  double listed = 0;
  double others = 0;
};

LOSSD_HOST_DEVICE inline TargetShares SharesOf(const TargetSums& sums, double log_sum_exp) {
  const double rest = RestOfTargets(sums.mass);
  const double left = sums.has_all ? 0 : 1 - std::exp(sums.log_sum_exp - log_sum_exp);
  const double least = LeastRest(log_sum_exp);
  // Below the least, the logarithm goes on as its tangent.
  const double log_left = left > least ? std::log(left) : std::log(least) + left / least - 1;
  const double divisor = left > least ? left : least;
  TargetShares shares;
  shares.divergence = sums.mass * log_sum_exp - sums.cross + sums.negentropy;
  if (rest > 0) shares.divergence += rest * (std::log(rest) - log_left);
  shares.listed = sums.mass + rest * (left / divisor);
  shares.others = shares.listed - rest / divisor;
  return shares;
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_TARGET_SHARES_H_
