// The step over rows whose softmax is over a list of tokens: everything is gathered, and nothing is done for
// an entry of the vocabulary that no list has.
#ifndef LOSSD_KERNELS_CPU_GATHERED_KEPT_TOKENS_H_
#define LOSSD_KERNELS_CPU_GATHERED_KEPT_TOKENS_H_

#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cpu {

// What a workspace needs for a row with so many tokens in its list.
int64_t KeptWorkspaceBytes(int64_t tokens, int64_t hidden);

// `params` has passed ValidateStep and has kept_tokens.
Status RunKeptTokens(const LinearCrossEntropyParams& params, LinearCrossEntropyStats* stats);

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_GATHERED_KEPT_TOKENS_H_
