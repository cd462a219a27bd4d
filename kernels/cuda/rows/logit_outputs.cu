#include <algorithm>

#include "kernels/cuda/rows/largest_logits.cuh"
#include "kernels/cuda/rows/logit_outputs.h"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

// Blocks that share a row whose logits stay where their sums were.
constexpr int64_t kMostPieces = 64;

__device__ Logits RowOf(const LogitSums& logits, int64_t row) {
  return {logits.sums + row * logits.stride, logits.bias, logits.options};
}

// A softcap would hide that what it caps has overflowed. -infinity is the logit of an entry that is ruled
// out.
__device__ float LogitAt(const Logits& row, int64_t token) {
  if (row.options.softcap == 0) return row[token];
  const float bias = row.bias == nullptr ? 0.0f : row.bias[token];
  return (row.sums[token] + bias) * row.options.logit_scale < INFINITY ? row[token] : NaN();
}

template <class T>
__global__ void FinishLogitsKernel(const LogitSums logits) {
  const Logits row = RowOf(logits, blockIdx.x);
  T* out = reinterpret_cast<T*>(logits.sums + blockIdx.x * logits.stride);
  const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.y) * kThreads; first < logits.vocab; first += step) {
    const int64_t v = first + threadIdx.x;
    const float value = v < logits.vocab ? LogitAt(row, v) : 0.0f;
    __syncthreads();  // where narrow logits of these columns go there were sums: all of them have been read
    if (v < logits.vocab) out[v] = static_cast<T>(value);
  }
}

__global__ void FindTopLogitsKernel(const LogitSums logits, const TopLogits out) {
  const int64_t row = blockIdx.x;
  const Logits of_row = RowOf(logits, row);
  float largest = -INFINITY;
  int32_t overflowed = 0;
  for (int64_t v = threadIdx.x; v < logits.vocab; v += kThreads) {
    const float logit = LogitAt(of_row, v);
    overflowed |= logit < INFINITY ? 0 : 1;
    largest = fmaxf(largest, logit);
  }
  largest = MaximumOfBlock(largest);
  overflowed = __syncthreads_or(overflowed);
  double sum = 0;
  for (int64_t v = threadIdx.x; v < logits.vocab && largest > -INFINITY; v += kThreads) {
    sum += expf(of_row[v] - largest);
  }
  sum = SumOfBlock(sum);
  if (threadIdx.x == 0) {
    out.log_sum_exp[row] = overflowed != 0 ? NaN() : static_cast<float>(largest + log(sum));
  }
  if (overflowed != 0) {
    if (static_cast<int32_t>(threadIdx.x) >= out.top_k) return;
    out.tokens[row * out.top_k + threadIdx.x] = -1;
    out.logits[row * out.top_k + threadIdx.x] = NaN();
    return;
  }
  ForEachLargest(of_row, logits.vocab, out.top_k, [&](int32_t place, Key key) {
    out.tokens[row * out.top_k + place] = TokenOf(key);
    out.logits[row * out.top_k + place] = LogitOf(key);
  });
}

}  // namespace

Result FinishLogits(const LogitSums& logits, DataType type, cudaStream_t stream) {
  const int64_t pieces =
      type == DataType::kFloat32 ? std::min(kMostPieces, CeilDivide(logits.vocab, kThreads)) : 1;
  const dim3 grid(static_cast<unsigned>(logits.rows), static_cast<unsigned>(pieces));
  WithType(type, [&](auto to) { FinishLogitsKernel<decltype(to)><<<grid, kThreads, 0, stream>>>(logits); });
  return {cudaGetLastError(), "FinishLogits"};
}

Result FindTopLogits(const LogitSums& logits, const TopLogits& out, cudaStream_t stream) {
  FindTopLogitsKernel<<<Blocks(logits.rows, 1), kThreads, 0, stream>>>(logits, out);
  return {cudaGetLastError(), "FindTopLogits"};
}

Result LoadLogitOutputKernels() {
  KernelLoader loader;
  loader.Add(&FinishLogitsKernel<float>);
  loader.Add(&FinishLogitsKernel<__nv_bfloat16>);
  loader.Add(&FinishLogitsKernel<__half>);
  loader.Add(&FindTopLogitsKernel);
  return loader.result();
}

}  // namespace lossd::kernels::cuda
