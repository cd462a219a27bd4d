#include <algorithm>

#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

// Products of finite numbers whose magnitudes stay below this have finite sums.
constexpr double kLargestLogit = 0x1p126;
// Beyond this the exponent would leave the integers that the splitting of e^z works with.
constexpr float kLargestPlainLogit = 0x1p20f;

__device__ int32_t RowsOf(const TileRows& tile, Which which) {
  return which == Which::kAll ? tile.rows : *tile.redo_count;
}
__device__ int32_t PlaceOf(const TileRows& tile, Which which, int32_t i) {
  return which == Which::kAll ? i : tile.redo_rows[i];
}

// kAligned: rows of hidden states begin at multiples of eight elements too.
template <class T, class TIn, bool kAligned>
__global__ void PrepareRowsKernel(const TileRows tile, const TIn* hidden_states) {
  AwaitPreviousKernel();
  const auto row = static_cast<int32_t>(blockIdx.x);
  if (row == 0 && threadIdx.x == 0) *tile.redo_count = 0;
  const TIn* from = hidden_states + tile.batch_rows[row] * tile.hidden;
  const int32_t label = tile.labels[row];
  const bool is_own = IsOwn(tile, label);
  const T* own = static_cast<const T*>(tile.weight) + (is_own ? label : 0) * tile.padded_hidden;
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
  const double scale = fmax(1.0, static_cast<double>(tile.options.logit_scale));
  const double bound =
      static_cast<double>(largest) * *tile.weight_largest * static_cast<double>(tile.hidden) * scale;
  double shift = 0;
  if (tile.bias != nullptr) {
    shift = *tile.bias_largest * scale;
    target += tile.bias[is_own ? label : 0];
  }
  // Each by itself: ranks that know the largest of their own entries only then find together what one finds
  // that has them all. NaN counts.
  const double most = tile.bias == nullptr ? kLargestLogit : kLargestLogit / 2;
  const bool overflowed = !all_finite || !(bound < most) || !(shift < most);
  if (threadIdx.x == 0) {
    tile.largest[row] = largest;
    const CappedLogit<double> logit = TransformLogit(overflowed ? 0.0 : target, tile.options);
    tile.target_logits[row] = is_own ? static_cast<float>(logit.value) : -__int_as_float(0x7F800000);
    if (tile.options.softcap != 0) tile.target_slopes[row] = static_cast<float>(logit.slope);
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
  float largest = maxima[i];
  for (int32_t t = 1; t < tiles; ++t) largest = fmaxf(largest, maxima[t * stride + i]);
  // As the product's epilogue does it: an exact maximum is exactly one of its logits.
  largest = __fmul_rn(largest, tile.options.logit_scale);
  if (tile.options.softcap != 0) largest = FastLogitCap(tile.options.softcap)(largest).value;
  // Finite where a bias rules all of them out: such a sample is below the others, which are then redone.
  largest = fmaxf(fmaxf(tile.target_logits[row], largest), -kLargestFloat);
  const bool exact = maximum == Maximum::kOfAll;
  const bool plain = !exact && fabsf(largest) <= kLargestPlainLogit;
  // Even, so that ties of the splitting round alike whatever is chosen.
  const int32_t exponent = plain   ? __float2int_rn(largest * 0.72134752f) * 2 + kHeadroom
                           : exact ? 0
                                   : kHeadroom;
  tile.offsets[row] = plain ? 0.0f : largest;
  tile.exponents[row] = exponent + (exact ? 0 : tile.exponent_bias);
}

constexpr int kFinishThreads = 1024;
constexpr int kFinishRows = 32;
constexpr int kFinishParts = kFinishThreads / kFinishRows;

// Threads of one warp take neighbouring rows, warps take parts of the sums; the parts are added in order.
// The total is for the threads of the first part.
__device__ double SumPieceOf(const float* pieces, const SumPieces& sums, int32_t row, bool valid) {
  __shared__ double parts[kFinishParts][kFinishRows];
  const auto part = static_cast<int32_t>(threadIdx.x / kFinishRows);
  double sum = 0;
  if (valid) {
    const float* of_row = pieces + row;
    const int32_t end = sums.tiles * (part + 1) / kFinishParts;
#pragma unroll 8
    for (int32_t t = sums.tiles * part / kFinishParts; t < end; ++t) sum += of_row[t * sums.stride];
  }
  __syncthreads();
  parts[part][threadIdx.x % kFinishRows] = sum;
  __syncthreads();
  if (part != 0) return 0;
  double total = 0;
#pragma unroll
  for (int p = 0; p < kFinishParts; ++p) total += parts[p][threadIdx.x];
  return total;
}

__device__ void WriteStatistics(const TileRows& tile, int32_t row, const RowSums& sums) {
  const RowUnits units = UnitsOf(tile, row);
  tile.statistics[row] = {tile.overflowed[row] != 0 ? -1.0 : sums.others,
                          sums.smoothing_sum,
                          sums.moment,
                          tile.offsets[row],
                          units.exponent,
                          units.target_logit,
                          units.target_slope,
                          IsOwn(tile, tile.labels[row]) ? 1 : 0};
}

__global__ void __launch_bounds__(kFinishThreads)
    FinishRowsKernel(const TileRows tile, Which which, const SumPieces pieces) {
  AwaitPreviousKernel();
  const int32_t rows = RowsOf(tile, which);
  const bool counts = which == Which::kRedo && tile.rows_redone != nullptr;
  if (counts && blockIdx.x == 0 && threadIdx.x == 0) *tile.rows_redone += rows;
  const auto i = static_cast<int32_t>(blockIdx.x * kFinishRows + threadIdx.x % kFinishRows);
  const auto part = static_cast<int32_t>(threadIdx.x / kFinishRows);
  if (static_cast<int32_t>(blockIdx.x * kFinishRows) >= rows) return;
  const int32_t row = i < rows ? PlaceOf(tile, which, i) : 0;
  RowSums sums;
  sums.others = SumPieceOf(pieces.exponentials, pieces, row, i < rows);
  if (pieces.logits != nullptr) sums.smoothing_sum = SumPieceOf(pieces.logits, pieces, row, i < rows);
  if (pieces.moments != nullptr) sums.moment = SumPieceOf(pieces.moments, pieces, row, i < rows);
  if (part != 0 || i >= rows) return;
  const ScaledExponential exponential(tile.offsets[row], tile.exponents[row]);
  sums.own = OwnExponential(exponential, tile.target_logits[row]);
  if (which == Which::kAll && tile.overflowed[row] == 0 && !(sums.others + sums.own <= kLargestSum)) {
    tile.redo_rows[atomicAdd(tile.redo_count, 1)] = row;
    return;
  }
  const int32_t label = tile.labels[row];
  if (pieces.logits != nullptr) {
    if (IsOwn(tile, label)) {
      sums.smoothing_sum += WeightedLogit(ClassWeight(tile, label), tile.target_logits[row]);
    }
  } else if (tile.options.label_smoothing != 0) {
    sums.smoothing_sum = tile.options.logit_scale * tile.smoothing_logits[row];
  }
  if (tile.statistics != nullptr) {
    WriteStatistics(tile, row, sums);
    return;
  }
  WriteRow(tile, row, FinishRow(tile, row, sums));
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
    // In this order: scale * factor may be infinite where x is zero. And no -0 where a row does not count: x
    // of one that overflowed is 0 only on ranks that knew it from the start.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x.values[i] = static_cast<T>(share == 0.0f ? 0.0f : scale * Widen(x.values[i]) * factor);
    }
    *reinterpret_cast<Eight<T>*>(to + h) = x;
  }
}

// A block looks after the rows of one label, if it is that of the first of them, and some columns.
template <class T>
__global__ void AddTargetsKernel(const TileRows tile, float* gradient) {
  AwaitPreviousKernel();
  const auto first = static_cast<int32_t>(blockIdx.x);
  const int32_t label = tile.labels[tile.by_label[first]];
  if (!IsOwn(tile, label) || (first > 0 && tile.labels[tile.by_label[first - 1]] == label)) return;
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

Result FinishRows(const TileRows& tile, Which which, const SumPieces& sums, cudaStream_t stream) {
  return LaunchRows("FinishRows", {Blocks(tile.rows, kFinishRows), kFinishThreads}, tile, stream,
                    FinishRowsKernel, which, sums);
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

Result LoadRowKernels(DataType weight_type) {
  KernelLoader loader;
  WithType(weight_type, [&](auto type) {
    using T = decltype(type);
    for (const DataType other_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      WithType(other_type, [&](auto other) {
        using Other = decltype(other);
        loader.Add(&PrepareRowsKernel<T, Other, false>);
        loader.Add(&PrepareRowsKernel<T, Other, true>);
      });
    }
    loader.Add(&GatherRedoRowsKernel<T>);
    loader.Add(&ScaleRowsKernel<T>);
    loader.Add(&AddTargetsKernel<T>);
    loader.Add(&LargestMagnitudeKernel<T>);
  });
  loader.Add(&ChooseExponentsKernel);
  loader.Add(&FinishRowsKernel);
  loader.Add(&ChooseFactorKernel);
  return loader.result();
}

}  // namespace lossd::kernels::cuda
