// Logits of rows, for generation: s = c tanh(τ (X Wᵀ + b) / c), the ones that the fused step's losses are of.
//
// Pure compute on raw pointers and sizes, as linear_cross_entropy.h.
#ifndef LOSSD_KERNELS_LOGITS_H_
#define LOSSD_KERNELS_LOGITS_H_

#include <cstdint>

#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels {

// Results for rows: all of their logits, or the largest ones and the log-sum-exp. A null array is not wanted.
struct LogitOutputs {
  DataType type = DataType::kFloat32;
  void* logits = nullptr;  // [N, V] of `type`: rounded to nearest, infinite where it does not fit

  // How many of the largest are wanted: above 0 all three arrays are, with -1 and NaN in rows that overflow.
  // Ties go to the lower token.
  int32_t top_k = 0;              // 0 to kMostTopK and V
  int32_t* top_tokens = nullptr;  // [N, top_k], best first
  float* top_logits = nullptr;    // [N, top_k]
  float* log_sum_exp = nullptr;   // [N]
};

struct LogitsParams {
  // Null: this is the whole head. Otherwise as in LinearCrossEntropyParams: `vocab`, `weight` and `bias` are
  // this rank's, every rank makes the call with the same rows and wishes, and the rank that answers gets the
  // outputs of the whole vocabulary; elsewhere their pointers only say what is wanted.
  const Shard* shard = nullptr;

  int64_t rows = 0;    // N >= 1
  int64_t vocab = 0;   // V >= 1
  int64_t hidden = 0;  // H >= 1

  DataType weight_type = DataType::kFloat32;
  const void* weight = nullptr;  // W [V, H]
  const float* bias = nullptr;   // b [V], finite; null: none

  DataType hidden_type = DataType::kFloat32;  // rounded to the weight's type before the product
  const void* hidden_states = nullptr;        // X [N, H]; finite

  float logit_scale = 1.0f;  // τ, finite and above 0
  float softcap = 0.0f;      // c, finite and above 0; 0: none

  LogitOutputs outputs;

  void* workspace = nullptr;  // as for the fused step: at least WorkspaceBytes(1, ...); 64-byte aligned
  int64_t workspace_bytes = 0;
};

// On all cores of the CPU. Any N: rows are worked on in tiles that fit the workspace. A row's bits do not
// depend on the rows beside it, nor on whether all of its logits are wanted or the largest. Logits and tokens
// have the same bits however the vocabulary lies over ranks; the log-sum-exp has them for all numbers of
// ranks with fixed segments, and otherwise is within a rounding. Failures over ranks: as of
// CpuLinearCrossEntropy.
Status CpuLogits(const LogitsParams& params);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_LOGITS_H_
