#include <algorithm>
#include <limits>

#include "kernels/cuda/rows/held_rows.h"
#include "kernels/cuda/rows/row_kernels.cuh"
#include "kernels/cuda/rows/tile_buffers.h"

namespace lossd::kernels::cuda {
namespace {

int64_t Divide(const HeadShape& shape, int64_t rows, void* base, HoldSpace* space) {
  Divider divider(base);
  const int64_t values = rows * static_cast<int64_t>(sizeof(float));
  space->rows = rows;
  space->pieces = CeilDivide(shape.vocab, HoldSpace::kPieceColumns);
  space->stride = RoundUp(shape.vocab, 8);
  divider.Take(&space->exponentials, rows * space->stride * SizeOf(shape.weight_type));
  divider.Take(&space->sums, space->pieces * values);
  divider.Take(&space->moments, space->pieces * values);
  divider.Take(&space->offsets, values);
  divider.Take(&space->exponents, values);
  divider.Take(&space->target_logits, values);
  return divider.used();
}

// Threads of a block are neighbouring rows, blocks of y are pieces.
__global__ void __launch_bounds__(kThreads)
    TakeRowsKernel(const TileRows tile, const TakenRows taken, const HoldSpace space) {
  AwaitPreviousKernel();
  const auto row = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (row >= tile.rows) return;
  const int64_t held = taken.rows == nullptr ? taken.first + row : taken.rows[row];
  for (int64_t piece = blockIdx.y; piece < space.pieces; piece += gridDim.y) {
    taken.sums[piece * taken.stride + row] = space.sums[piece * space.rows + held];
    if (taken.moments != nullptr) {
      taken.moments[piece * taken.stride + row] = space.moments[piece * space.rows + held];
    }
  }
  if (blockIdx.y != 0) return;
  tile.offsets[row] = space.offsets[held];
  tile.exponents[row] = space.exponents[held];
  if (__float_as_int(tile.target_logits[row]) != __float_as_int(space.target_logits[held])) {
    tile.overflowed[row] = 1;
  }
}

// log2(e 2^power) of an e above 0: powers of two meet as integers, so that the choice of `power` changes
// nothing.
__device__ inline float LogOf(float e, int32_t power) {
  constexpr int32_t kMantissa = 0x7FFFFF;
  const int32_t bits = __float_as_int(e);
  const float mantissa = __int_as_float((bits & kMantissa) | __float_as_int(1.0f));
  return __log2f(mantissa) + static_cast<float>((bits >> 23) - 127 + power);
}

template <class T, bool kSpread>
__global__ void __launch_bounds__(kThreads)
    CopyEntriesKernel(const TileRows tile, const T* exponentials, const int32_t* places, T* entries,
                      int64_t stride) {
  constexpr float kLn2 = 0.693147181f;
  AwaitPreviousKernel();
  const auto row = static_cast<int32_t>(blockIdx.y);
  const T* from = exponentials + (places == nullptr ? row : places[row]) * stride;
  T* to = entries + row * stride;
  const float factor = kSpread ? tile.gradient_factors[row] : 0.0f;
  const float spread = kSpread ? tile.entropy_factors[row] : 0.0f;
  const int32_t power = kSpread ? tile.exponents[row] : 0;
  const float mean = kSpread ? tile.means[row] : 0.0f;
  const int64_t first = 8 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  const int64_t step = 8 * static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t column = first; column < stride; column += step) {
    Eight<T> values = *reinterpret_cast<const Eight<T>*>(from + column);
    if constexpr (kSpread) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // 0 is the label's, that of no entry, and of one too small to matter.
        const float e = Widen(values.values[i]);
        const float s = __fmaf_rn(LogOf(e, power), kLn2, -mean);
        values.values[i] = static_cast<T>(e > 0.0f ? __fmaf_rn(-spread, s, factor) * e : 0.0f);
      }
    }
    *reinterpret_cast<Eight<T>*>(to + column) = values;
  }
}

}  // namespace

HoldSpace HoldSpace::In(const HeadShape& shape, int64_t bytes, void* base) {
  HoldSpace space;
  int64_t fits = 0;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  int64_t too_many = std::min(kMost, bytes / (shape.vocab * SizeOf(shape.weight_type)) + 1);
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (Divide(shape, middle, nullptr, &space) <= bytes ? fits : too_many) = middle;
  }
  if (Divide(shape, fits, base, &space) > bytes) space.rows = 0;
  return space;
}

Result TakeHeldRows(const TileRows& tile, const TakenRows& taken, cudaStream_t stream) {
  if (tile.rows == 0) return {};
  constexpr unsigned kBlocksOfPieces = 32;
  cudaLaunchAttribute attribute = DependentLaunch();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(Blocks(tile.rows, kThreads), kBlocksOfPieces);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = tile.dependent_launches ? 1 : 0;
  return {cudaLaunchKernelEx(&config, TakeRowsKernel, tile, taken, *taken.space), "TakeHeldRows"};
}

Result CopyEntries(const TileRows& tile, const void* exponentials, const int32_t* places, void* entries,
                   int64_t stride, cudaStream_t stream) {
  if (tile.rows == 0) return {};
  cudaLaunchAttribute attribute = DependentLaunch();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(Blocks(stride, 32 * kThreads), static_cast<unsigned>(tile.rows));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = tile.dependent_launches ? 1 : 0;
  Result result;
  WithType(tile.type, [&](auto type) {
    using T = decltype(type);
    const auto kernel = tile.spread ? CopyEntriesKernel<T, true> : CopyEntriesKernel<T, false>;
    result = {cudaLaunchKernelEx(&config, kernel, tile, static_cast<const T*>(exponentials), places,
                                 static_cast<T*>(entries), stride),
              "CopyEntries"};
  });
  return result;
}

Result LoadHeldRowKernels(DataType weight_type) {
  KernelLoader loader;
  loader.Add(&TakeRowsKernel);
  WithType(weight_type, [&](auto type) {
    using T = decltype(type);
    loader.Add(&CopyEntriesKernel<T, false>);
    loader.Add(&CopyEntriesKernel<T, true>);
  });
  return loader.result();
}

}  // namespace lossd::kernels::cuda
