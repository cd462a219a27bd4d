#include "kernels/cuda/losses/target_lists.h"
#include "kernels/cuda/rows/kept_rows.h"
#include "kernels/cuda/rows/listed_logit.cuh"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

constexpr int32_t kWarp = 32;
constexpr int32_t kWarps = kThreads / kWarp;

__device__ double MaximumOfWarp(double value) {
  for (int i = kWarp / 2; i > 0; i /= 2) value = fmax(value, __shfl_xor_sync(0xFFFFFFFF, value, i));
  return value;
}

// A warp has a row.
__global__ void __launch_bounds__(kThreads) SumTargetsKernel(const TileRows tile, const ListedTargets lists) {
  const auto row = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / kWarp);
  if (row >= tile.rows) return;
  const int32_t end = lists.offsets[row + 1];
  const int32_t begin = lists.offsets[row] + static_cast<int32_t>(threadIdx.x % kWarp);
  const int32_t label = tile.labels[row];
  double largest = -INFINITY;
  double own = 0;
  bool has_own = false;
  TargetSums sums;
  for (int32_t i = begin; i < end; i += kWarp) {
    const double s = Capped(tile, lists.logits[i]).value;
    const double q = lists.probabilities[i];
    largest = fmax(largest, s);
    sums.mass += q;
    if (q > 0) {
      sums.cross += q * s;
      sums.negentropy += q * log(q);
    }
    if (lists.tokens[i] != label) continue;
    own = q;
    has_own = true;
  }
  largest = MaximumOfWarp(largest);
  double sum = 0;
  for (int32_t i = begin; i < end; i += kWarp) sum += exp(Capped(tile, lists.logits[i]).value - largest);
  sum = SumOfWarp(sum);
  sums.mass = SumOfWarp(sums.mass);
  sums.cross = SumOfWarp(sums.cross);
  sums.negentropy = SumOfWarp(sums.negentropy);
  sums.own = static_cast<float>(SumOfWarp(own));
  sums.has_own = __any_sync(0xFFFFFFFF, has_own) != 0;
  sums.log_sum_exp = sum > 0 ? largest + log(sum) : -INFINITY;
  sums.has_all = end - lists.offsets[row] == tile.vocab;
  if (threadIdx.x % kWarp == 0) tile.target_sums[row] = sums;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    PutTargetsKernel(const TileRows tile, const ListedTargets lists, T* entries, int64_t stride) {
  const auto row = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / kWarp);
  if (row >= tile.rows) return;
  const TargetFactors factors = tile.target_factors[row];
  const bool overflowed = tile.overflowed[row] != 0;
  const int32_t label = tile.labels[row];
  const int32_t end = lists.offsets[row + 1];
  for (int32_t i = lists.offsets[row] + static_cast<int32_t>(threadIdx.x % kWarp); i < end; i += kWarp) {
    const int32_t token = lists.tokens[i];
    if (token == label) continue;
    const CappedLogit<double> s = Capped(tile, lists.logits[i]);
    const double p = exp(s.value - factors.log_sum_exp);
    double factor = factors.listed;
    if (factors.spread != 0 && p > 0) factor -= factors.spread * (s.value - factors.mean);
    const double entry = factor * p - factors.target * lists.probabilities[i];
    entries[row * stride + token] = static_cast<T>(overflowed ? 0.0f : static_cast<float>(entry * s.slope));
  }
}

}  // namespace

Result SumTargets(const TileRows& tile, const ListedTargets& lists, cudaStream_t stream) {
  const KeptLists gathered{.offsets = lists.offsets, .tokens = lists.tokens, .values = lists.logits};
  LOSSD_CUDA_PASS_ON(GatherLogits(tile, gathered, stream));
  SumTargetsKernel<<<Blocks(tile.rows, kWarps), kThreads, 0, stream>>>(tile, lists);
  return {cudaGetLastError(), "SumTargets"};
}

Result PutTargets(const TileRows& tile, const ListedTargets& lists, void* entries, int64_t stride,
                  cudaStream_t stream) {
  WithType(tile.type, [&](auto type) {
    using T = decltype(type);
    PutTargetsKernel<T>
        <<<Blocks(tile.rows, kWarps), kThreads, 0, stream>>>(tile, lists, static_cast<T*>(entries), stride);
  });
  return {cudaGetLastError(), "PutTargets"};
}

Result LoadTargetListKernels(DataType weight_type) {
  KernelLoader loader;
  loader.Add(&SumTargetsKernel);
  WithType(weight_type, [&](auto type) { loader.Add(&PutTargetsKernel<decltype(type)>); });
  return loader.result();
}

}  // namespace lossd::kernels::cuda
