// What a block finds of one row's logits, and what is told of it.
#ifndef LOSSD_KERNELS_CUDA_ROWS_ROW_RETURNS_CUH_
#define LOSSD_KERNELS_CUDA_ROWS_ROW_RETURNS_CUH_

#include "kernels/cuda/rows/largest_logits.cuh"
#include "kernels/cuda/rows/row_kernels.cuh"
#include "kernels/cuda/rows/row_parts.h"

namespace lossd::kernels::cuda {

// The same for all threads. `label` is among these `vocab` logits or not; `of_label` is its logit.
__device__ inline RowPart FindRowPart(const Logits& logits, int64_t vocab, int32_t label, float of_label) {
  Key best = 0;
  for (int64_t v = threadIdx.x; v < vocab; v += kThreads) best = max(best, logits.At(v));
  best = LargestOfBlock(best);
  RowPart part;
  if (best == 0) return part;  // no entries
  part.largest = LogitOf(best);
  part.token = TokenOf(best);
  if (part.largest == -kInfinity) return part;
  int32_t above = 0;
  for (int64_t v = threadIdx.x; v < vocab; v += kThreads) {
    const float logit = logits[v];
    const float below = logit - part.largest;
    const float e = expf(below);
    part.sum += e;
    if (e > 0) part.moment += static_cast<double>(e) * below;
    above += v != label && logit > of_label ? 1 : 0;
  }
  part.sum = SumOfBlock(part.sum);
  part.moment = SumOfBlock(part.moment);
  part.above = static_cast<int32_t>(SumOfBlock(above));  // exact
  return part;
}

__device__ inline void TellRow(const RowReturns& returns, int32_t place, const RowPart& row) {
  if (returns.prediction != nullptr) returns.prediction[place] = row.token;
  if (returns.target_rank != nullptr) returns.target_rank[place] = row.above;
  if (returns.entropy != nullptr) returns.entropy[place] = static_cast<float>(EntropyOf(row));
}

// `largest` and `log_sum` make up the log-sum-exp.
__device__ inline void TellTop(const RowReturns& returns, int32_t place, int32_t rank, Key key, float largest,
                               double log_sum) {
  const int64_t to = static_cast<int64_t>(place) * returns.top_k + rank;
  if (returns.top_tokens != nullptr) returns.top_tokens[to] = TokenOf(key);
  if (returns.top_log_probabilities == nullptr) return;
  const double below = static_cast<double>(LogitOf(key)) - static_cast<double>(largest);
  returns.top_log_probabilities[to] = static_cast<float>(below - log_sum);
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_ROW_RETURNS_CUH_
