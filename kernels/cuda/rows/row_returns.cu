#include "kernels/cuda/rows/largest_logits.cuh"
#include "kernels/cuda/rows/row_kernels.cuh"
#include "kernels/cuda/rows/row_returns.h"

namespace lossd::kernels::cuda {
namespace {

// Largest first. `largest` and `log_sum` make up the log-sum-exp.
__device__ void TellTop(const RowReturns& returns, int32_t place, const Logits& logits, int64_t vocab,
                        float largest, double log_sum) {
  ForEachLargest(logits, vocab, returns.top_k, [&](int32_t rank, Key key) {
    const int64_t to = static_cast<int64_t>(place) * returns.top_k + rank;
    if (returns.top_tokens != nullptr) returns.top_tokens[to] = TokenOf(key);
    if (returns.top_log_probabilities != nullptr) {
      const double below = static_cast<double>(LogitOf(key)) - static_cast<double>(largest);
      returns.top_log_probabilities[to] = static_cast<float>(below - log_sum);
    }
  });
}

__global__ void TellWholeRowsKernel(const TileRows tile, int32_t first, const float* sums, int64_t stride) {
  AwaitPreviousKernel();
  const int32_t row = first + static_cast<int32_t>(blockIdx.x);
  const int32_t place = tile.batch_rows[row];
  const RowReturns& returns = tile.returns;
  const Logits logits{sums + blockIdx.x * stride, tile.bias, tile.options};
  Key best = 0;
  for (int64_t v = threadIdx.x; v < tile.vocab; v += kThreads) best = max(best, logits.At(v));
  best = LargestOfBlock(best);
  const float largest = LogitOf(best);

  const int32_t label = tile.labels[row];
  const float own = logits[label];
  double sum = 0;
  double moment = 0;
  int32_t above = 0;
  for (int64_t v = threadIdx.x; v < tile.vocab; v += kThreads) {
    const float logit = logits[v];
    const float below = logit - largest;
    const float e = expf(below);
    sum += e;
    moment += static_cast<double>(e) * below;
    above += v != label && logit > own ? 1 : 0;
  }
  sum = SumOfBlock(sum);
  moment = SumOfBlock(moment);
  const double all_above = SumOfBlock(above);  // exact
  const double log_sum = log(sum);
  if (threadIdx.x == 0) {
    if (returns.prediction != nullptr) returns.prediction[place] = TokenOf(best);
    if (returns.target_rank != nullptr) returns.target_rank[place] = static_cast<int32_t>(all_above);
    if (returns.entropy != nullptr) returns.entropy[place] = static_cast<float>(log_sum - moment / sum);
  }
  if (returns.top_k > 0) TellTop(returns, place, logits, tile.vocab, largest, log_sum);
}

__global__ void ForgetOverflowedRowsKernel(const TileRows tile) {
  AwaitPreviousKernel();
  const auto row = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (row >= tile.rows || tile.overflowed[row] == 0) return;
  const int32_t place = tile.batch_rows[row];
  const RowReturns& returns = tile.returns;
  if (returns.entropy != nullptr) returns.entropy[place] = NaN();
  if (returns.prediction != nullptr) returns.prediction[place] = -1;
  if (returns.target_rank != nullptr) returns.target_rank[place] = -1;
  for (int32_t i = 0; i < returns.top_k; ++i) {
    const int64_t at = static_cast<int64_t>(place) * returns.top_k + i;
    if (returns.top_tokens != nullptr) returns.top_tokens[at] = -1;
    if (returns.top_log_probabilities != nullptr) returns.top_log_probabilities[at] = NaN();
  }
}

}  // namespace

Result TellWholeRows(const TileRows& tile, int32_t first, int32_t rows, const float* sums, int64_t stride,
                     cudaStream_t stream) {
  return LaunchRows("TellWholeRows", {Blocks(rows, 1)}, tile, stream, TellWholeRowsKernel, first, sums,
                    stride);
}

Result ForgetOverflowedRows(const TileRows& tile, cudaStream_t stream) {
  return LaunchRows("ForgetOverflowedRows", {Blocks(tile.rows, kThreads)}, tile, stream,
                    ForgetOverflowedRowsKernel);
}

Result LoadReturnKernels() {
  KernelLoader loader;
  loader.Add(&TellWholeRowsKernel);
  loader.Add(&ForgetOverflowedRowsKernel);
  return loader.result();
}

}  // namespace lossd::kernels::cuda
