#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/exponential.cuh"
#include "kernels/cuda/row_kernels.h"
#include "kernels/rounding.h"
#include "kernels/row_range.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// Products of finite numbers whose magnitudes stay below this have finite sums.
constexpr double kLargestLogit = 0x1p126;
// Beyond this the exponent would leave the integers that the splitting of e^z works with.
constexpr float kLargestPlainLogit = 0x1p20f;

__device__ float NaN() { return __int_as_float(0x7FFFFFFF); }

template <class T>
__device__ float Widen(T value) {
  return static_cast<float>(value);
}

__device__ float MaximumOfWarp(float value) {
  for (int i = 16; i > 0; i /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, i));
  return value;
}
__device__ double SumOfWarp(double value) {
  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, i);
  return value;
}

// Over all threads of a block, for all of them.
__device__ float MaximumOfBlock(float value) {
  __shared__ float parts[kThreads / 32];
  __syncthreads();
  value = MaximumOfWarp(value);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  for (float part : parts) value = fmaxf(value, part);
  return value;
}
__device__ double SumOfBlock(double value) {
  __shared__ double parts[kThreads / 32];
  __syncthreads();
  value = SumOfWarp(value);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (double part : parts) sum += part;
  return sum;
}

__device__ int32_t RowsOf(const TileRows& tile, Which which) {
  return which == Which::kAll ? tile.rows : *tile.redo_count;
}
__device__ int32_t PlaceOf(const TileRows& tile, Which which, int32_t i) {
  return which == Which::kAll ? i : tile.redo_rows[i];
}

// Eight elements, which fill whole memory transactions. Rows of padded matrices begin at multiples of eight.
template <class T>
struct alignas(16) Eight {
  T values[8];
};

// kAligned: rows of hidden states begin at multiples of eight elements too.
template <class T, class TIn, bool kAligned>
__global__ void PrepareRowsKernel(const TileRows tile, const TIn* hidden_states) {
  AwaitPreviousKernel();
  const auto row = static_cast<int32_t>(blockIdx.x);
  if (row == 0 && threadIdx.x == 0) *tile.redo_count = 0;
  const TIn* from = hidden_states + tile.batch_rows[row] * tile.hidden;
  const T* own = static_cast<const T*>(tile.weight) + tile.labels[row] * tile.padded_hidden;
  T* to = static_cast<T*>(tile.x) + row * tile.padded_hidden;
  float largest = 0;
  double target = 0;
  bool finite = true;
  for (int64_t h = 8 * static_cast<int64_t>(threadIdx.x); h < tile.padded_hidden; h += 8 * kThreads) {
    Eight<TIn> in{};
    if constexpr (kAligned) {
      in = *reinterpret_cast<const Eight<TIn>*>(from + h);
    } else {
      for (int i = 0; i < 8 && h + i < tile.hidden; ++i) in.values[i] = from[h + i];
    }
    const auto weight = *reinterpret_cast<const Eight<T>*>(own + h);
    Eight<T> x;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x.values[i] = h + i < tile.hidden ? static_cast<T>(Widen(in.values[i])) : static_cast<T>(0.0f);
      const float wide = Widen(x.values[i]);
      finite = finite && isfinite(wide);
      largest = fmaxf(largest, fabsf(wide));
      target += static_cast<double>(wide) * Widen(weight.values[i]);
    }
    *reinterpret_cast<Eight<T>*>(to + h) = x;
  }
  largest = MaximumOfBlock(largest);
  target = SumOfBlock(target);
  const bool all_finite = __syncthreads_and(finite);
  const double bound = static_cast<double>(largest) * *tile.weight_largest * static_cast<double>(tile.hidden);
  const bool overflowed = !all_finite || !(bound < kLargestLogit);  // NaN counts
  if (threadIdx.x == 0) {
    tile.largest[row] = largest;
    tile.target_logits[row] = overflowed ? 0.0f : static_cast<float>(target);
    tile.overflowed[row] = overflowed ? 1 : 0;
  }
  if (!overflowed) return;
  for (int64_t h = threadIdx.x; h < tile.hidden; h += kThreads) to[h] = static_cast<T>(0.0f);
}

__global__ void ChooseExponentsKernel(const TileRows tile, Which which, Maximum maximum, const float* maxima,
                                      int32_t tiles, int64_t stride) {
  AwaitPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= RowsOf(tile, which)) return;
  const int32_t row = PlaceOf(tile, which, i);
  float largest = tile.target_logits[row];
  for (int32_t t = 0; t < tiles; ++t) largest = fmaxf(largest, maxima[t * stride + i]);
  const bool exact = maximum == Maximum::kOfAll;
  const bool plain = !exact && fabsf(largest) <= kLargestPlainLogit;
  // Even, so that ties of the splitting round alike whatever is chosen.
  const int32_t exponent = plain   ? __float2int_rn(largest * 0.72134752f) * 2 + kHeadroom
                           : exact ? 0
                                   : kHeadroom;
  tile.offsets[row] = plain ? 0.0f : largest;
  tile.exponents[row] = exponent + (exact ? 0 : tile.exponent_bias);
}

struct RowOutcome {
  float loss;
  float log_sum_exp;
  float scale;
  float target_gradient;
  bool overflowed;
};

// From the sum of E without the label's, and the label's own.
__device__ RowOutcome FinishRow(const TileRows& tile, int32_t row, double others, double own) {
  constexpr double kLn2 = 0.693147180559945309417;
  const double sum = others + own;
  const double log_sum_exp = log(sum) + tile.exponents[row] * kLn2 + tile.offsets[row];
  double loss = log_sum_exp - tile.target_logits[row];  // where the label's own E is below the range
  if (own > 0) loss = own > others ? log1p(others / own) : log(sum / own);
  const double g = tile.gradient_scales[row];
  RowOutcome out{static_cast<float>(loss), static_cast<float>(log_sum_exp), static_cast<float>(g / sum),
                 static_cast<float>(-g * (others / sum)), tile.overflowed[row] != 0};
  const double largest = tile.largest[row];
  const bool in_range = fabs(g) * largest < kLargestContribution &&
                        fabs(static_cast<double>(out.scale)) * largest < kLargestScaledRow;
  out.overflowed = out.overflowed || (tile.gradient_wanted && !in_range);
  if (out.overflowed) out = {NaN(), NaN(), NaN(), NaN(), true};
  return out;
}

// The label's own E; 0 below the range.
__device__ double OwnExponential(const ScaledExponential& exponential, float target_logit) {
  return exponential.IsBelow(target_logit) ? 0.0 : exponential(target_logit);
}

__device__ void WriteRow(const TileRows& tile, int32_t row, const RowOutcome& out) {
  tile.losses[tile.batch_rows[row]] = out.loss;
  if (tile.log_sum_exps != nullptr) tile.log_sum_exps[tile.batch_rows[row]] = out.log_sum_exp;
  tile.scales[row] = out.scale;
  tile.target_gradients[row] = out.target_gradient;
  tile.overflowed[row] = out.overflowed ? 1 : 0;
}

constexpr int kFinishThreads = 1024;
constexpr int kFinishRows = 32;
constexpr int kFinishParts = kFinishThreads / kFinishRows;

// Threads of one warp take neighbouring rows, warps take parts of the sums; the parts are added in order.
__global__ void FinishRowsKernel(const TileRows tile, Which which, const float* sums, int32_t tiles,
                                 int64_t stride) {
  __shared__ double parts[kFinishParts][kFinishRows];
  AwaitPreviousKernel();
  const int32_t rows = RowsOf(tile, which);
  const bool counts = which == Which::kRedo && tile.rows_redone != nullptr;
  if (counts && blockIdx.x == 0 && threadIdx.x == 0) *tile.rows_redone += rows;
  const auto i = static_cast<int32_t>(blockIdx.x * kFinishRows + threadIdx.x % kFinishRows);
  const auto part = static_cast<int32_t>(threadIdx.x / kFinishRows);
  if (static_cast<int32_t>(blockIdx.x * kFinishRows) >= rows) return;
  const int32_t row = i < rows ? PlaceOf(tile, which, i) : 0;
  double sum = 0;
  if (i < rows) {
    const float* of_row = sums + row;
    const int32_t end = tiles * (part + 1) / kFinishParts;
#pragma unroll 8
    for (int32_t t = tiles * part / kFinishParts; t < end; ++t) sum += of_row[t * stride];
  }
  parts[part][threadIdx.x % kFinishRows] = sum;
  __syncthreads();
  if (part != 0 || i >= rows) return;
  double others = 0;
#pragma unroll
  for (int p = 0; p < kFinishParts; ++p) others += parts[p][threadIdx.x];
  const ScaledExponential exponential(tile.offsets[row], tile.exponents[row]);
  const double own = OwnExponential(exponential, tile.target_logits[row]);
  if (which == Which::kAll && tile.overflowed[row] == 0 && !(others + own <= kLargestSum)) {
    tile.redo_rows[atomicAdd(tile.redo_count, 1)] = row;
    return;
  }
  WriteRow(tile, row, FinishRow(tile, row, others, own));
}

template <class T>
__global__ void GatherRedoRowsKernel(const TileRows tile) {
  AwaitPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x);
  if (i >= *tile.redo_count) return;
  const T* from = static_cast<const T*>(tile.x) + tile.redo_rows[i] * tile.padded_hidden;
  T* to = static_cast<T*>(tile.scaled_x) + i * tile.padded_hidden;
  for (int64_t h = threadIdx.x; h < tile.padded_hidden; h += kThreads) to[h] = from[h];
}

__device__ float ShareOf(const TileRows& tile, int32_t row) {
  if (tile.overflowed[row] != 0) return 0.0f;
  return tile.shares == nullptr ? 1.0f : tile.shares[row];
}

// One block: the power of two that brings the largest element of v x to about 2^14.
__global__ void ChooseFactorKernel(const TileRows tile) {
  AwaitPreviousKernel();
  float largest = 0;
  for (int32_t row = static_cast<int32_t>(threadIdx.x); row < tile.rows; row += kThreads) {
    if (ShareOf(tile, row) != 0.0f) largest = fmaxf(largest, fabsf(tile.scales[row]) * tile.largest[row]);
  }
  largest = MaximumOfBlock(largest);
  if (threadIdx.x != 0) return;
  const int exponent = largest > 0 ? 14 - static_cast<int>(ceilf(log2f(largest))) : 0;
  const int bounded = min(max(exponent, -120), 120);
  tile.factors[0] = exp2f(static_cast<float>(bounded));
  tile.factors[1] = exp2f(static_cast<float>(-bounded));
  tile.factors[2] = 0.0f;
  tile.factors[3] = 1.0f;
}

template <class T>
__global__ void ScaleRowsKernel(const TileRows tile, bool use_factor) {
  AwaitPreviousKernel();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const float share = ShareOf(tile, row);
  const float scale = share == 0.0f ? 0.0f : tile.scales[row] * share;
  const float factor = use_factor ? tile.factors[0] : 1.0f;
  const T* from = static_cast<const T*>(tile.x) + row * tile.padded_hidden;
  T* to = static_cast<T*>(tile.scaled_x) + row * tile.padded_hidden;
  for (int64_t h = 8 * static_cast<int64_t>(threadIdx.x); h < tile.padded_hidden; h += 8 * kThreads) {
    Eight<T> x = *reinterpret_cast<const Eight<T>*>(from + h);
#pragma unroll
    // In this order: scale * factor may be infinite where x is zero.
    for (int i = 0; i < 8; ++i) x.values[i] = static_cast<T>(scale * Widen(x.values[i]) * factor);
    *reinterpret_cast<Eight<T>*>(to + h) = x;
  }
}

// A block looks after the rows of one label, if it is that of the first of them, and some columns.
template <class T>
__global__ void AddTargetsKernel(const TileRows tile, float* gradient) {
  AwaitPreviousKernel();
  const auto first = static_cast<int32_t>(blockIdx.x);
  const int32_t label = tile.labels[tile.by_label[first]];
  if (first > 0 && tile.labels[tile.by_label[first - 1]] == label) return;
  for (int64_t h = 8 * static_cast<int64_t>(threadIdx.x); h < tile.padded_hidden; h += 8 * kThreads) {
    float sums[8] = {};
    for (int32_t i = first; i < tile.rows; ++i) {
      const int32_t row = tile.by_label[i];
      if (tile.labels[row] != label) break;
      const float share = ShareOf(tile, row);
      if (share == 0.0f) continue;
      const float factor = tile.target_gradients[row] * share;
      const auto x =
          *reinterpret_cast<const Eight<T>*>(static_cast<const T*>(tile.x) + row * tile.padded_hidden + h);
#pragma unroll
      for (int k = 0; k < 8; ++k) sums[k] = __fmaf_rn(factor, Widen(x.values[k]), sums[k]);
    }
    auto* to = reinterpret_cast<Eight<float>*>(gradient + label * tile.padded_hidden + h);
    Eight<float> out = *to;
#pragma unroll
    for (int k = 0; k < 8; ++k) out.values[k] += sums[k];
    *to = out;
  }
}

template <class T>
__global__ void LargestMagnitudeKernel(const T* values, int64_t count, float* largest) {
  float found = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const float magnitude = fabsf(Widen(values[i]));
    found = fmaxf(found, isfinite(magnitude) ? magnitude : __int_as_float(0x7F800000));
  }
  found = MaximumOfBlock(found);
  // Bits of numbers that are not negative order like the numbers.
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<int32_t*>(largest), __float_as_int(found));
}

// --- The portable path

template <class T>
__global__ void SoftmaxRowsKernel(const TileRows tile, float* logits, int64_t stride) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  float* z = logits + row * stride;
  T* e = reinterpret_cast<T*>(z);
  const int32_t label = tile.labels[row];
  float largest = tile.target_logits[row];
  for (int64_t v = threadIdx.x; v < tile.vocab; v += kThreads) largest = fmaxf(largest, z[v]);
  largest = MaximumOfBlock(largest);
  const ScaledExponential exponential(largest, 0);
  double others = 0;
  for (int64_t first = 0; first < stride; first += kThreads) {
    const int64_t v = first + threadIdx.x;
    const float value = v < tile.vocab && v != label ? exponential(z[v]) : 0.0f;
    __syncthreads();  // E of these columns lies where logits before them did: all of them have been read
    if (v < stride) e[v] = static_cast<T>(value);
    others += value;
  }
  others = SumOfBlock(others);
  if (threadIdx.x != 0) return;
  tile.offsets[row] = largest;
  tile.exponents[row] = 0;
  WriteRow(tile, row, FinishRow(tile, row, others, OwnExponential(exponential, tile.target_logits[row])));
}

template <class T, class TOut>
__global__ void FinishInputGradientKernel(const TileRows tile, const float* product, TOut* out) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  const T* own = static_cast<const T*>(tile.weight) + tile.labels[row] * tile.padded_hidden;
  for (int64_t h = threadIdx.x; h < tile.hidden; h += kThreads) {
    const float x = __fmaf_rn(tile.target_gradients[row], Widen(own[h]),
                              tile.scales[row] * product[row * tile.padded_hidden + h]);
    out[tile.batch_rows[row] * tile.hidden + h] = static_cast<TOut>(x);
  }
}

// --- Dispatch

// Calls `function` with a value of the type that `type` stands for.
template <class Function>
void WithType(DataType type, Function function) {
  switch (type) {
    case DataType::kFloat32:
      return function(float());
    case DataType::kBFloat16:
      return function(__nv_bfloat16());
    case DataType::kFloat16:
      return function(__half());
  }
}

unsigned Blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>(CeilDivide(count, per_block));
}

struct Grid {
  unsigned blocks = 0;
  unsigned threads = kThreads;
};

// Of a kernel that begins with AwaitPreviousKernel.
template <class... Parameters, class... Arguments>
Result LaunchRows(const char* what, Grid grid, const TileRows& tile, cudaStream_t stream,
                  void (*kernel)(TileRows, Parameters...), Arguments... arguments) {
  cudaLaunchAttribute attribute = DependentLaunch();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = tile.dependent_launches ? 1 : 0;
  return {cudaLaunchKernelEx(&config, kernel, tile, Parameters(arguments)...), what};
}

}  // namespace

Result PrepareRows(const TileRows& tile, DataType hidden_type, const void* hidden_states,
                   cudaStream_t stream) {
  Result result;
  WithType(tile.type, [&](auto type) {
    WithType(hidden_type, [&](auto in) {
      const auto* from = static_cast<const decltype(in)*>(hidden_states);
      const bool aligned = tile.hidden % 8 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
      const auto kernel = aligned ? PrepareRowsKernel<decltype(type), decltype(in), true>
                                  : PrepareRowsKernel<decltype(type), decltype(in), false>;
      result = LaunchRows("PrepareRows", {Blocks(tile.rows, 1)}, tile, stream, kernel, from);
    });
  });
  return result;
}

Result ChooseExponents(const TileRows& tile, Which which, Maximum maximum, const float* maxima, int32_t tiles,
                       int64_t stride, cudaStream_t stream) {
  return LaunchRows("ChooseExponents", {Blocks(tile.rows, kThreads)}, tile, stream, ChooseExponentsKernel,
                    which, maximum, maxima, tiles, stride);
}

Result FinishRows(const TileRows& tile, Which which, const float* sums, int32_t tiles, int64_t stride,
                  cudaStream_t stream) {
  return LaunchRows("FinishRows", {Blocks(tile.rows, kFinishRows), kFinishThreads}, tile, stream,
                    FinishRowsKernel, which, sums, tiles, stride);
}

Result GatherRedoRows(const TileRows& tile, cudaStream_t stream) {
  Result result;
  WithType(tile.type, [&](auto type) {
    const auto kernel = GatherRedoRowsKernel<decltype(type)>;
    result = LaunchRows("GatherRedoRows", {Blocks(tile.rows, 1)}, tile, stream, kernel);
  });
  return result;
}

Result ScaleRows(const TileRows& tile, cudaStream_t stream) {
  const bool use_factor = tile.type == DataType::kFloat16;
  if (use_factor) LOSSD_CUDA_PASS_ON(LaunchRows("ChooseFactor", {1}, tile, stream, ChooseFactorKernel));
  Result result;
  WithType(tile.type, [&](auto type) {
    const auto kernel = ScaleRowsKernel<decltype(type)>;
    result = LaunchRows("ScaleRows", {Blocks(tile.rows, 1)}, tile, stream, kernel, use_factor);
  });
  return result;
}

Result AddTargets(const TileRows& tile, float* gradient, cudaStream_t stream) {
  Result result;
  WithType(tile.type, [&](auto type) {
    const auto kernel = AddTargetsKernel<decltype(type)>;
    result = LaunchRows("AddTargets", {Blocks(tile.rows, 1)}, tile, stream, kernel, gradient);
  });
  return result;
}

Result LargestMagnitude(DataType type, const void* values, int64_t count, float* largest,
                        cudaStream_t stream) {
  LOSSD_CUDA_TRY(cudaMemsetAsync(largest, 0, sizeof(float), stream));
  constexpr int64_t kMostBlocks = 2048;
  WithType(type, [&](auto element) {
    using T = decltype(element);
    LargestMagnitudeKernel<<<static_cast<unsigned>(std::min<int64_t>(Blocks(count, kThreads), kMostBlocks)),
                             kThreads, 0, stream>>>(static_cast<const T*>(values), count, largest);
  });
  return {cudaGetLastError(), "LargestMagnitude"};
}

Result SoftmaxRows(const TileRows& tile, float* logits, int64_t stride, cudaStream_t stream) {
  WithType(tile.type, [&](auto type) {
    SoftmaxRowsKernel<decltype(type)><<<Blocks(tile.rows, 1), kThreads, 0, stream>>>(tile, logits, stride);
  });
  return {cudaGetLastError(), "SoftmaxRows"};
}

Result FinishInputGradient(const TileRows& tile, const float* product, DataType out_type, void* out,
                           cudaStream_t stream) {
  WithType(tile.type, [&](auto type) {
    WithType(out_type, [&](auto to) {
      FinishInputGradientKernel<decltype(type)>
          <<<Blocks(tile.rows, 1), kThreads, 0, stream>>>(tile, product, static_cast<decltype(to)*>(out));
    });
  });
  return {cudaGetLastError(), "FinishInputGradient"};
}

Result LoadRowKernels(DataType weight_type) {
  Result result;
  const auto load = [&result](auto* kernel) {
    cudaFuncAttributes attributes{};
    if (result.ok()) result = {cudaFuncGetAttributes(&attributes, kernel), "loading a kernel of rows"};
  };
  WithType(weight_type, [&](auto type) {
    using T = decltype(type);
    for (const DataType other_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      WithType(other_type, [&](auto other) {
        using Other = decltype(other);
        load(&PrepareRowsKernel<T, Other, false>);
        load(&PrepareRowsKernel<T, Other, true>);
        load(&FinishInputGradientKernel<T, Other>);
      });
    }
    load(&GatherRedoRowsKernel<T>);
    load(&ScaleRowsKernel<T>);
    load(&AddTargetsKernel<T>);
    load(&LargestMagnitudeKernel<T>);
    load(&SoftmaxRowsKernel<T>);
  });
  load(&ChooseExponentsKernel);
  load(&FinishRowsKernel);
  load(&ChooseFactorKernel);
  return result;
}

}  // namespace lossd::kernels::cuda
