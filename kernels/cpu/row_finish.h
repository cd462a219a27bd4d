// Computes a row's loss, outputs and gradient factors from its sums (docs/numerics.md).
#ifndef LOSSD_KERNELS_CPU_ROW_FINISH_H_
#define LOSSD_KERNELS_CPU_ROW_FINISH_H_

#include <cstdint>

#include "kernels/cpu/logit_rows.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/soft_targets.h"
#include "kernels/cpu/workspace.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

// Sum of C: of the class weights, or of ones. Used by label smoothing only; 0 without.
double SumOfClassWeights(const LinearCrossEntropyParams& params);

// Sets every return of row `index`: to `token` if it is a token or a rank, otherwise to `number`.
void FillReturns(const RowReturns& returns, int64_t index, float number, int32_t token);

class RowFinish {
 public:
  // All references outlive it.
  RowFinish(const LinearCrossEntropyParams& params, const SimdKernels& kernels, const Workspace& tile,
            GradientForm form, double class_weight_sum, const SoftTargets* soft);

  // Writes losses and returns of row `r` of the tile and sets its factors. If it turned out to have
  // overflowed, they say so.
  void Finish(int64_t r) const;

 private:
  double RowWeight(int64_t index) const;
  float ClassWeight(int64_t label) const;
  double SmoothingCost(int64_t r, double cost) const;
  double Entropy(int64_t r) const;
  void WriteOrder(int64_t r, double log_sum_exp) const;
  double LabelWeight() const;
  bool SetFactors(int64_t r, double log_sum_exp) const;
  void FinishOverflowed(int64_t r) const;

  const LinearCrossEntropyParams& params_;
  const SimdKernels& kernels_;
  const Workspace& tile_;
  const GradientForm form_;
  const double class_weight_sum_;
  const SoftTargets* const soft_;
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_ROW_FINISH_H_
