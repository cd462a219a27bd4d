// What happens to one row's logits of one block: scale and softcap, sums and order, E, and the gradient where
// it is more than a multiple of E.
#ifndef LOSSD_KERNELS_CPU_LOGIT_ROWS_H_
#define LOSSD_KERNELS_CPU_LOGIT_ROWS_H_

#include <cstdint>

#include "kernels/cpu/row_order.h"
#include "kernels/cpu/simd_kernels.h"
#include "kernels/cpu/soft_targets.h"
#include "kernels/cpu/workspace.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

// What the products for dX and dW take from the tile.
enum class GradientForm {
  kExponentials,      // E (times softcap's derivative): the rest is a factor of the row
  kFromExponentials,  // label smoothing, targets on lists: made from E, once the row's sum is known
  kFromLogits,        // where that takes more than E as it is kept: from the logits, multiplied again or kept
};

enum class Pass {
  kFirstBlock,     // to E, with the row's exponent chosen from this block
  kFurtherBlocks,  // to E
  kFindMaximum,    // reads only
  kAgain,          // to E with another offset; what does not depend on it has been taken
  kGradient,       // from logits or E, as the form says
};

// Whether blocks keep the largest logit and the moment: of the entropy and of its gradient.
bool WantsMoments(const LinearCrossEntropyParams& params);

class LogitRows {
 public:
  // All arguments outlive it.
  LogitRows(const LinearCrossEntropyParams& params, const SimdKernels& kernels, const Workspace& tile,
            GradientForm form, const SoftTargets* soft);

  const RowOrder& order() const { return order_; }

  // values: of row `r`, all columns of `block`; changed in place, except by kFindMaximum. The label's own
  // place is left 0.
  void Process(Pass pass, int64_t block, int64_t r, float* values) const;

  // Logit s of a product and the entry it is of; with the same bits as in a block.
  float Transform(float product, int64_t entry) const;
  // The same in place, of products of entries from `first` on; of a softcap also its derivatives.
  void Transform(int64_t first, float* values, float* factors, int64_t columns) const;

 private:
  void FindMaximum(int64_t block, int64_t r, const float* values) const;
  void ChooseExponent(const float* logits, int64_t columns, RowState& row) const;
  void Exponentiate(Pass pass, int64_t block, int64_t r, float* values, const float* factors) const;
  void FormGradient(int64_t block, int64_t r, float* values, const float* factors) const;
  // Tokens of a block that are in the row's list of soft targets.
  struct Listed;
  void FormListed(int64_t block, int64_t r, const float* exponentials, const float* logits,
                  const float* factors, Listed* listed) const;
  int64_t Columns(int64_t block) const;
  bool smooths() const { return params_.options.label_smoothing > 0; }
  bool caps() const { return params_.options.softcap > 0; }

  const LinearCrossEntropyParams& params_;
  const SimdKernels& kernels_;
  const Workspace& tile_;
  const GradientForm form_;
  const SoftTargets* const soft_;
  const RowOrder order_;
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_LOGIT_ROWS_H_
