// The oracle's divergences: textbook formulas in fp64.
#ifndef LOSSD_KERNELS_REFERENCE_DIVERGENCE_H_
#define LOSSD_KERNELS_REFERENCE_DIVERGENCE_H_

#include <vector>

#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels {

struct ReferenceDivergence {
  double value = 0;            // D
  std::vector<double> slopes;  // ∂D/∂s
};

// `logits` are a row's, `teacher_logits` its teacher's, before the temperature.
ReferenceDivergence DivergenceOf(const Distillation& options, const std::vector<double>& logits,
                                 const std::vector<double>& teacher_logits);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_REFERENCE_DIVERGENCE_H_
