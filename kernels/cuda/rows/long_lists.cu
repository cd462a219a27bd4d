#include "kernels/cuda/rows/long_lists.h"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

// A block has a row.
__global__ void __launch_bounds__(kThreads)
    PickLogitsKernel(const TileRows tile, const KeptLists lists, int32_t first, const float* sums,
                     int64_t stride) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  const float* const of_row = sums + row * stride;
  const int32_t end = lists.offsets[first + row + 1];
  for (auto i = lists.offsets[first + row] + static_cast<int32_t>(threadIdx.x); i < end; i += kThreads) {
    const int32_t token = lists.tokens[i];
    double sum = of_row[token];
    if (tile.bias != nullptr) sum += tile.bias[token];
    lists.values[i - lists.first_entry] = static_cast<float>(sum * tile.options.logit_scale);
  }
}

// A block has a row, whose entries are 0.
template <class T>
__global__ void __launch_bounds__(kThreads)
    SpreadListsKernel(const TileRows tile, const KeptLists lists, T* entries, int64_t stride) {
  constexpr int kLeastExponent = -126;  // whose power of two is a normal number
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t label = tile.labels[row];
  const int32_t begin = lists.offsets[row] + static_cast<int32_t>(threadIdx.x);
  const int32_t end = lists.offsets[row + 1];
  if (tile.overflowed[row] != 0) {
    if (threadIdx.x == 0) tile.scales[row] = tile.target_gradients[row] = NaN();
    return;
  }
  float largest = 0;
  for (int32_t i = begin; i < end; i += kThreads) {
    const float value = lists.values[i - lists.first_entry];
    if (lists.tokens[i] == label) {
      tile.target_gradients[row] = value;
    } else {
      largest = fmaxf(largest, fabsf(value));
    }
  }
  largest = MaximumOfBlock(largest);
  const int exponent = largest == 0 ? 0 : max(ilogbf(largest), kLeastExponent);
  if (threadIdx.x == 0) tile.scales[row] = scalbnf(1.0f, exponent);
  for (int32_t i = begin; i < end; i += kThreads) {
    if (lists.tokens[i] == label) continue;
    const float value = scalbnf(lists.values[i - lists.first_entry], -exponent);
    entries[row * stride + lists.tokens[i]] = static_cast<T>(value);
  }
}

}  // namespace

Result PickLogits(const TileRows& tile, const KeptLists& lists, int32_t first, int32_t rows,
                  const float* sums, int64_t stride, cudaStream_t stream) {
  PickLogitsKernel<<<Blocks(rows, 1), kThreads, 0, stream>>>(tile, lists, first, sums, stride);
  return {cudaGetLastError(), "PickLogits"};
}

Result SpreadLists(const TileRows& tile, const KeptLists& lists, void* entries, int64_t stride,
                   cudaStream_t stream) {
  const auto bytes = static_cast<size_t>(tile.rows * stride * SizeOf(tile.type));
  LOSSD_CUDA_TRY(cudaMemsetAsync(entries, 0, bytes, stream));
  WithType(tile.type, [&](auto type) {
    using T = decltype(type);
    SpreadListsKernel<T>
        <<<Blocks(tile.rows, 1), kThreads, 0, stream>>>(tile, lists, static_cast<T*>(entries), stride);
  });
  return {cudaGetLastError(), "SpreadLists"};
}

Result LoadLongListKernels(DataType weight_type) {
  KernelLoader loader;
  loader.Add(&PickLogitsKernel);
  WithType(weight_type, [&](auto type) { loader.Add(&SpreadListsKernel<decltype(type)>); });
  return loader.result();
}

}  // namespace lossd::kernels::cuda
