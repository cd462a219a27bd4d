#include "kernels/cuda/rows/row_returns.cuh"
#include "kernels/cuda/rows/row_returns.h"

namespace lossd::kernels::cuda {
namespace {

__global__ void TellWholeRowsKernel(const TileRows tile, int32_t first, const float* sums, int64_t stride) {
  AwaitPreviousKernel();
  const int32_t row = first + static_cast<int32_t>(blockIdx.x);
  const int32_t place = tile.batch_rows[row];
  const RowReturns& returns = tile.returns;
  const Logits logits{sums + blockIdx.x * stride, tile.bias, tile.options};
  const int32_t label = tile.labels[row];
  const RowPart found = FindRowPart(logits, tile.vocab, label, logits[label]);
  if (threadIdx.x == 0) TellRow(returns, place, found);
  if (returns.top_k == 0) return;
  const double log_sum = log(found.sum);
  ForEachLargest(logits, tile.vocab, returns.top_k,
                 [&](int32_t rank, Key key) { TellTop(returns, place, rank, key, found.largest, log_sum); });
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
