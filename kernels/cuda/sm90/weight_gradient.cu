#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda::sm90 {
namespace {

template <class T>
using Large = ProductTile<T, 128, 192, 2, 5, Schedule::kPingPong, Cluster::kPair, Major::kMN, Major::kMN>;

template <class T, bool kAdd>
Result Multiply(const TileRows& tile, const void* exponentials, int64_t stride, float* gradient,
                cudaStream_t stream) {
  WeightGradientEpilogue<kAdd> epilogue{};
  epilogue.gradient = gradient;
  epilogue.stride = tile.padded_hidden;
  epilogue.factor = tile.type == DataType::kFloat16 ? tile.factors + 1 : nullptr;
  ProductShape shape;
  shape.m = static_cast<int32_t>(tile.padded_hidden);
  shape.n = static_cast<int32_t>(tile.vocab);
  shape.k = tile.rows;
  shape.group = 8;
  const Operand e{exponentials, tile.vocab, tile.rows, stride};
  const Operand x{tile.scaled_x, tile.padded_hidden, tile.rows, tile.padded_hidden};
  return Launch<Large<T>>(x, e, shape, epilogue, tile.spared_multiprocessors, stream);
}

template <class T>
Result LoadAll() {
  const Result adding = Load<WeightGradientEpilogue<true>, Large<T>>();
  return adding.ok() ? Load<WeightGradientEpilogue<false>, Large<T>>() : adding;
}

}  // namespace

Result LoadWeightGradientKernels(DataType type) {
  return type == DataType::kBFloat16 ? LoadAll<__nv_bfloat16>() : LoadAll<__half>();
}

Result MultiplyWeightGradient(const TileRows& tile, const void* exponentials, int64_t stride, Store store,
                              float* gradient, cudaStream_t stream) {
  const bool add = store == Store::kAdd;
  if (tile.type == DataType::kBFloat16) {
    return add ? Multiply<__nv_bfloat16, true>(tile, exponentials, stride, gradient, stream)
               : Multiply<__nv_bfloat16, false>(tile, exponentials, stride, gradient, stream);
  }
  return add ? Multiply<__half, true>(tile, exponentials, stride, gradient, stream)
             : Multiply<__half, false>(tile, exponentials, stride, gradient, stream);
}

}  // namespace lossd::kernels::cuda::sm90
