#include "kernels/cuda/rows/bias.h"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

// A block sums some columns of E over all rows: eight columns are a lane's, and each warp takes every
// kWarps-th row. In the end each thread has one column.
constexpr int kColumns = kThreads;
constexpr int kWarps = kThreads / 32;
static_assert(kColumns == 32 * 8);
// Rows whose factors are in shared memory at once.
constexpr int kRows = kThreads;
// Rows that a warp reads before it uses any.
constexpr int kRowsAhead = 4;
static_assert(kRows % (kWarps * kRowsAhead) == 0);

__global__ void LargestShiftKernel(const float* bias, int64_t vocab, float* largest) {
  float found = 0;
  for (int64_t v = threadIdx.x; v < vocab; v += kThreads) found = fmaxf(found, ShiftOf(bias[v]));
  found = MaximumOfBlock(found);
  if (threadIdx.x == 0) *largest = found;
}

__global__ void SumBiasKernel(const float* bias, int64_t vocab, const float* class_weights, double* out) {
  double sum = 0;
  for (int64_t v = threadIdx.x; v < vocab; v += kThreads) {
    sum += (class_weights == nullptr ? 1.0 : static_cast<double>(class_weights[v])) * bias[v];
  }
  sum = SumOfBlock(sum);
  if (threadIdx.x == 0) *out = sum;
}

// sums[k] += Σ factor E of the lane's columns over its warp's part of `rows` rows, which begin at `e`.
template <class T>
__device__ void AddRows(const T* e, int64_t stride, int32_t rows, const float* factors, double (&sums)[8]) {
  for (int i = static_cast<int>(threadIdx.x) / 32; i < rows; i += kWarps * kRowsAhead) {
    Eight<T> ahead[kRowsAhead];
#pragma unroll
    for (int j = 0; j < kRowsAhead; ++j) {
      const int row = i + j * kWarps;
      if (row < rows) ahead[j] = *reinterpret_cast<const Eight<T>*>(e + row * stride);
    }
#pragma unroll
    for (int j = 0; j < kRowsAhead; ++j) {
      const int row = i + j * kWarps;
      // What does not count is not even multiplied by 0: E of a row that overflowed means nothing.
      if (row >= rows || factors[row] == 0.0f) continue;
      const double factor = factors[row];
#pragma unroll
      for (int k = 0; k < 8; ++k) sums[k] += factor * static_cast<double>(Widen(ahead[j].values[k]));
    }
  }
}

// Σ c of the rows with this label, in their order.
__device__ double SumOfTargets(const TileRows& tile, int64_t label) {
  int32_t first = 0;
  for (int32_t end = tile.rows; first < end;) {
    const int32_t middle = first + (end - first) / 2;
    if (tile.labels[tile.by_label[middle]] < label) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  double sum = 0;
  for (int32_t i = first; i < tile.rows; ++i) {
    const int32_t row = tile.by_label[i];
    if (tile.labels[row] != label) break;
    const float share = ShareOf(tile, row);
    if (share != 0.0f) sum += static_cast<double>(tile.target_gradients[row]) * share;
  }
  return sum;
}

template <class T>
__global__ void AddBiasGradientKernel(const TileRows tile, const T* exponentials, int64_t stride,
                                      BiasStore store, float* db) {
  AwaitPreviousKernel();
  __shared__ float factors[kRows];
  __shared__ double parts[kWarps][kColumns];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kColumns;
  const int32_t lane_column = thread % 32 * 8;
  const bool has_columns = first_column + lane_column < tile.vocab;
  double sums[8] = {};
  double smoothing = 0;
  for (int32_t first = 0; first < tile.rows; first += kRows) {
    const int32_t row = first + thread;
    const float share = row < tile.rows ? ShareOf(tile, row) : 0.0f;
    __syncthreads();  // the factors before these have been used
    factors[thread] = share == 0.0f ? 0.0f : tile.scales[row] * share;
    if (tile.smoothing == Smoothing::kRankOne && share != 0.0f) {
      smoothing += static_cast<double>(tile.smoothing_factors[row]) * share;
    }
    __syncthreads();
    if (!has_columns) continue;
    AddRows(exponentials + first * stride + first_column + lane_column, stride, min(kRows, tile.rows - first),
            factors, sums);
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) parts[thread / 32][lane_column + k] = sums[k];
  smoothing = SumOfBlock(smoothing);
  __syncthreads();
  const int64_t column = first_column + thread;
  if (column >= tile.vocab) return;
  double sum = 0;
  for (const auto& of_warp : parts) sum += of_warp[thread];
  sum += SumOfTargets(tile, column);
  if (tile.smoothing == Smoothing::kRankOne) sum -= ClassWeight(tile, column) * smoothing;
  db[column] = static_cast<float>((store == BiasStore::kAdd ? static_cast<double>(db[column]) : 0.0) + sum);
}

}  // namespace

Result LargestShift(const float* bias, int64_t vocab, float* largest, cudaStream_t stream) {
  LargestShiftKernel<<<1, kThreads, 0, stream>>>(bias, vocab, largest);
  return {cudaGetLastError(), "LargestShift"};
}

Result SumBias(const float* bias, int64_t vocab, const float* class_weights, double* out,
               cudaStream_t stream) {
  SumBiasKernel<<<1, kThreads, 0, stream>>>(bias, vocab, class_weights, out);
  return {cudaGetLastError(), "SumBias"};
}

Result AddBiasGradient(const TileRows& tile, const void* exponentials, int64_t stride, BiasStore store,
                       float* db, cudaStream_t stream) {
  Result result;
  WithType(tile.type, [&](auto type) {
    using T = decltype(type);
    const auto kernel = AddBiasGradientKernel<T>;
    result = LaunchRows("AddBiasGradient", {Blocks(tile.vocab, kColumns)}, tile, stream, kernel,
                        static_cast<const T*>(exponentials), stride, store, db);
  });
  return result;
}

Result StoreBiasGradient(const TileRows& tile, const void* exponentials, int64_t stride, bool overwrite,
                         float* db, cudaStream_t stream) {
  if (db == nullptr) return {};
  if (tile.bias != nullptr) {
    const BiasStore store = overwrite ? BiasStore::kOverwrite : BiasStore::kAdd;
    return AddBiasGradient(tile, exponentials, stride, store, db, stream);
  }
  if (!overwrite) return {};
  LOSSD_CUDA_TRY(cudaMemsetAsync(db, 0, static_cast<size_t>(tile.vocab) * sizeof(float), stream));
  return {};
}

Result LoadBiasKernels(DataType weight_type) {
  KernelLoader loader;
  WithType(weight_type, [&](auto type) { loader.Add(&AddBiasGradientKernel<decltype(type)>); });
  loader.Add(&LargestShiftKernel);
  loader.Add(&SumBiasKernel);
  return loader.result();
}

}  // namespace lossd::kernels::cuda
