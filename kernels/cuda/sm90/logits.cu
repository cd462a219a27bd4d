#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda::sm90 {
namespace {

template <class T>
using Large =
    ProductTile<T, 128, kLogitColumns, 2, 5, Schedule::kPingPong, Cluster::kPair, Major::kK, Major::kK>;
template <class T>
using Medium =
    ProductTile<T, 128, kLogitColumns, 2, 5, Schedule::kCooperative, Cluster::kNone, Major::kK, Major::kK>;
template <class T>
using Small =
    ProductTile<T, 64, kLogitColumns, 1, 6, Schedule::kCooperative, Cluster::kNone, Major::kK, Major::kK>;

template <class T>
Result Multiply(const TileRows& tile, Which which, void* exponentials, int64_t stride, float* sums,
                int64_t sums_stride, cudaStream_t stream) {
  const bool redo = which == Which::kRedo;
  ExponentialsEpilogue<T> epilogue{};
  epilogue.exponentials = static_cast<T*>(exponentials);
  epilogue.stride = stride;
  epilogue.sums = sums;
  epilogue.sums_stride = sums_stride;
  epilogue.offsets = tile.offsets;
  epilogue.exponents = tile.exponents;
  epilogue.labels = tile.labels;
  epilogue.row_map = redo ? tile.redo_rows : nullptr;
  ProductShape shape;
  shape.m = tile.rows;
  shape.n = static_cast<int32_t>(tile.vocab);
  shape.k = static_cast<int32_t>(tile.hidden);
  shape.group = 8;
  shape.device_m = redo ? tile.redo_count : nullptr;
  const Operand x{redo ? tile.scaled_x : tile.x, tile.hidden, tile.rows, tile.padded_hidden};
  const Operand weight{tile.weight, tile.hidden, tile.vocab, tile.padded_hidden};
  if (tile.rows <= 64) return Launch<Small<T>>(x, weight, shape, epilogue, stream);
  if (tile.rows <= 128 || redo) return Launch<Medium<T>>(x, weight, shape, epilogue, stream);
  return Launch<Large<T>>(x, weight, shape, epilogue, stream);
}

template <class T>
Result LoadAll() {
  return Load<ExponentialsEpilogue<T>, Small<T>, Medium<T>, Large<T>>();
}

}  // namespace

Result LoadLogitKernels(DataType type) {
  return type == DataType::kBFloat16 ? LoadAll<__nv_bfloat16>() : LoadAll<__half>();
}

Result MultiplyLogits(const TileRows& tile, Which which, void* exponentials, int64_t stride, float* sums,
                      int64_t sums_stride, cudaStream_t stream) {
  return tile.type == DataType::kBFloat16
             ? Multiply<__nv_bfloat16>(tile, which, exponentials, stride, sums, sums_stride, stream)
             : Multiply<__half>(tile, which, exponentials, stride, sums, sums_stride, stream);
}

}  // namespace lossd::kernels::cuda::sm90
