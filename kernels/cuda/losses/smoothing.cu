#include "kernels/cuda/losses/smoothing.h"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

// A block sums a matrix's rows over some columns: eight columns are a thread's, and as many threads as there
// are parts take every kParts-th row.
constexpr int kColumns = 64;
constexpr int kColumnThreads = kColumns / 8;
constexpr int kParts = kThreads / kColumnThreads;
constexpr int kDotsPerBlock = kThreads / 32;

// The sum over rows of factor(row) times row; for threads below kColumns, of column blockIdx.x kColumns +
// threadIdx.x. Rows are `stride` elements apart, a multiple of eight.
template <class T, class Factor>
__device__ double SumOfRows(const T* matrix, int64_t rows, int64_t stride, Factor factor) {
  __shared__ double parts[kParts][kColumns];
  const auto part = static_cast<int>(threadIdx.x) / kColumnThreads;
  const int first = static_cast<int>(threadIdx.x) % kColumnThreads * 8;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + first;
  double sums[8] = {};
  if (column < stride) {
#pragma unroll 4
    for (int64_t row = part; row < rows; row += kParts) {
      const auto x = *reinterpret_cast<const Eight<T>*>(matrix + row * stride + column);
      const double scale = factor(row);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += scale * static_cast<double>(Widen(x.values[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) parts[part][first + i] = sums[i];
  __syncthreads();
  double total = 0;
  if (threadIdx.x < kColumns) {
    for (const auto& of_part : parts) total += of_part[threadIdx.x];
  }
  return total;
}

template <class T>
__global__ void SumVocabularyKernel(const T* weight, int64_t vocab, int64_t padded_hidden,
                                    const float* class_weights, float* out) {
  const double sum = SumOfRows(weight, vocab, padded_hidden, [=](int64_t row) {
    return class_weights == nullptr ? 1.0 : static_cast<double>(class_weights[row]);
  });
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  if (threadIdx.x < kColumns && column < padded_hidden) out[column] = static_cast<float>(sum);
}

// A warp takes a row.
template <class T>
__global__ void MultiplyVocabularySumKernel(const TileRows tile) {
  AwaitPreviousKernel();
  const auto row = static_cast<int32_t>(blockIdx.x * kDotsPerBlock + threadIdx.x / 32);
  if (row >= tile.rows) return;
  const T* x = static_cast<const T*>(tile.x) + row * tile.padded_hidden;
  double sum = 0;
  for (int64_t h = threadIdx.x % 32; h < tile.hidden; h += 32) {
    sum += static_cast<double>(Widen(x[h])) * tile.classes.vocabulary_sum[h];
  }
  sum = SumOfWarp(sum);
  if (tile.bias != nullptr) sum += *tile.classes.bias_sum;
  if (threadIdx.x % 32 == 0) tile.smoothing_logits[row] = sum;
}

template <class T>
__global__ void AddSmoothingKernel(const TileRows tile, bool overwrite, float* t) {
  AwaitPreviousKernel();
  const double sum =
      SumOfRows(static_cast<const T*>(tile.x), tile.rows, tile.padded_hidden, [&tile](int64_t row) {
        const auto place = static_cast<int32_t>(row);
        return static_cast<double>(tile.smoothing_factors[place]) * ShareOf(tile, place);
      });
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  if (threadIdx.x >= kColumns || column >= tile.padded_hidden) return;
  t[column] = static_cast<float>((overwrite ? 0.0 : static_cast<double>(t[column])) + sum);
}

}  // namespace

Result SumVocabulary(DataType type, const void* weight, int64_t vocab, int64_t padded_hidden,
                     const float* class_weights, float* out, cudaStream_t stream) {
  WithType(type, [&](auto element) {
    using T = decltype(element);
    SumVocabularyKernel<<<Blocks(padded_hidden, kColumns), kThreads, 0, stream>>>(
        static_cast<const T*>(weight), vocab, padded_hidden, class_weights, out);
  });
  return {cudaGetLastError(), "SumVocabulary"};
}

Result MultiplyVocabularySum(const TileRows& tile, cudaStream_t stream) {
  Result result;
  WithType(tile.type, [&](auto type) {
    const auto kernel = MultiplyVocabularySumKernel<decltype(type)>;
    result = LaunchRows("MultiplyVocabularySum", {Blocks(tile.rows, kDotsPerBlock)}, tile, stream, kernel);
  });
  return result;
}

Result AddSmoothing(const TileRows& tile, WeightGradient store, float* t, cudaStream_t stream) {
  if (store == WeightGradient::kNone) return {};
  Result result;
  WithType(tile.type, [&](auto type) {
    const auto kernel = AddSmoothingKernel<decltype(type)>;
    result = LaunchRows("AddSmoothing", {Blocks(tile.padded_hidden, kColumns)}, tile, stream, kernel,
                        store == WeightGradient::kOverwrite, t);
  });
  return result;
}

Result LoadSmoothingKernels(DataType weight_type) {
  KernelLoader loader;
  WithType(weight_type, [&](auto type) {
    using T = decltype(type);
    loader.Add(&SumVocabularyKernel<T>);
    loader.Add(&MultiplyVocabularySumKernel<T>);
    loader.Add(&AddSmoothingKernel<T>);
  });
  return loader.result();
}

}  // namespace lossd::kernels::cuda
