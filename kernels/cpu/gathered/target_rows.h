// What soft targets on lists add up to, row by row: gathered products alone.
#ifndef LOSSD_KERNELS_CPU_GATHERED_TARGET_ROWS_H_
#define LOSSD_KERNELS_CPU_GATHERED_TARGET_ROWS_H_

#include <cstdint>
#include <span>

#include "kernels/linear_cross_entropy.h"
#include "kernels/target_shares.h"

namespace lossd::kernels::cpu {

// One row's list, in ascending order of tokens.
struct TargetRow {
  std::span<const int32_t> tokens = {};
  const float* probabilities = nullptr;
};

inline TargetRow TargetRowOf(const TargetLists& targets, int64_t index) {
  const int64_t first = targets.lists.offsets[index];
  return {{targets.lists.tokens + first, static_cast<size_t>(targets.lists.size(index))},
          targets.probabilities + first};
}

// `params` has target_lists. `index` is a row of the batch whose logits are all finite.
TargetSums SumTargets(const LinearCrossEntropyParams& params, int64_t index);

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_GATHERED_TARGET_ROWS_H_
