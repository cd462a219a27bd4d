// The arithmetic of one element of an optimizer's step, for hosts and devices. What includes it is compiled
// without contraction into fused multiply-adds: then the bits are the same everywhere.
#ifndef LOSSD_KERNELS_OPTIMIZER_RULE_H_
#define LOSSD_KERNELS_OPTIMIZER_RULE_H_

#include <cmath>

#include "kernels/host_device.h"
#include "kernels/optimizer.h"

namespace lossd::kernels {

// The weight after a step of coefficients.moments == kMoments. `gradient` is scaled; moments that the rule
// does not have are not touched.
template <int kMoments>
LOSSD_HOST_DEVICE inline float UpdatedWeight(const OptimizerCoefficients& c, float gradient, float weight,
                                             float& first, float& second) {
  if (c.added_decay != 0) gradient = gradient + c.added_decay * weight;
  if constexpr (kMoments == 0) {
    return weight - c.step_size * gradient;
  } else if constexpr (kMoments == 1) {
    first = c.first_step ? gradient : c.momentum * first + c.fresh * gradient;
    const float update = c.nesterov ? gradient + c.momentum * first : first;
    return weight - c.step_size * update;
  } else {
    // torch.lerp, which takes the end that is nearer.
    const float difference = gradient - first;
    first = c.lerp_from_end ? gradient - difference * c.lerp_rest : first + c.lerp_weight * difference;
    second = second * c.beta2 + c.beta2_rest * gradient * gradient;
    const float denominator = std::sqrt(second) / c.second_root + c.eps;
    return weight * c.kept_weight - c.step_size * (first / denominator);
  }
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_OPTIMIZER_RULE_H_
