// The logits product with any epilogue.
#ifndef LOSSD_KERNELS_CUDA_SM90_LOGITS_CUH_
#define LOSSD_KERNELS_CUDA_SM90_LOGITS_CUH_

#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda::sm90 {

template <class T>
using LargeLogits =
    ProductTile<T, 128, kLogitColumns, 2, 5, Schedule::kPingPong, Cluster::kPair, Major::kK, Major::kK>;
template <class T>
using MediumLogits =
    ProductTile<T, 128, kLogitColumns, 2, 5, Schedule::kCooperative, Cluster::kNone, Major::kK, Major::kK>;
template <class T>
using SmallLogits =
    ProductTile<T, 64, kLogitColumns, 1, 6, Schedule::kCooperative, Cluster::kNone, Major::kK, Major::kK>;

// Beside LargeLogits' sums there are few registers left for an epilogue.
enum class LogitTiles { kAll, kUpToMedium };

template <class T, LogitTiles kTiles = LogitTiles::kAll, class Epilogue>
Result LaunchLogits(const TileRows& tile, Which which, const Epilogue& epilogue, cudaStream_t stream) {
  const bool redo = which == Which::kRedo;
  ProductShape shape;
  shape.m = tile.rows;
  shape.n = static_cast<int32_t>(tile.vocab);
  shape.k = static_cast<int32_t>(tile.hidden);
  shape.group = 8;
  shape.device_m = redo ? tile.redo_count : nullptr;
  const Operand x{redo ? tile.scaled_x : tile.x, tile.hidden, tile.rows, tile.padded_hidden};
  const Operand weight{tile.weight, tile.hidden, tile.vocab, tile.padded_hidden};
  if (tile.rows <= 64)
    return Launch<SmallLogits<T>>(x, weight, shape, epilogue, tile.spared_multiprocessors, stream);
  if constexpr (kTiles == LogitTiles::kAll) {
    if (tile.rows > 128 && !redo)
      return Launch<LargeLogits<T>>(x, weight, shape, epilogue, tile.spared_multiprocessors, stream);
  }
  return Launch<MediumLogits<T>>(x, weight, shape, epilogue, tile.spared_multiprocessors, stream);
}

template <class T, class Epilogue, LogitTiles kTiles = LogitTiles::kAll>
Result LoadLogits() {
  if constexpr (kTiles == LogitTiles::kAll) {
    return Load<Epilogue, SmallLogits<T>, MediumLogits<T>, LargeLogits<T>>();
  }
  return Load<Epilogue, SmallLogits<T>, MediumLogits<T>>();
}

template <class T, Transform kTransform, bool kMoments = false>
Result MultiplyExponentials(const TileRows& tile, Which which, const Exponentials& out, cudaStream_t stream) {
  const ExponentialsEpilogue<T, kTransform, kMoments> epilogue{
      .exponentials = static_cast<T*>(out.values),
      .stride = out.stride,
      .sums = out.sums,
      .moments = out.moments,
      .sums_stride = out.sums_stride,
      .offsets = tile.offsets,
      .exponents = tile.exponents,
      .labels = tile.labels,
      .row_map = which == Which::kRedo ? tile.redo_rows : nullptr,
      .bias = tile.bias,
      .logit_scale = tile.options.logit_scale,
      .cap = FastLogitCap(tile.options.softcap),
  };
  return LaunchLogits<T>(tile, which, epilogue, stream);
}

}  // namespace lossd::kernels::cuda::sm90

#endif  // LOSSD_KERNELS_CUDA_SM90_LOGITS_CUH_
