#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda::sm90 {
namespace {

template <class T>
using Large = ProductTile<T, 128, 256, 2, 4, Cluster::kPair, Major::kK, Major::kMN>;
// For sizes that Large fills the last wave badly with.
template <class T>
using Narrow = ProductTile<T, 128, 192, 2, 5, Cluster::kPair, Major::kK, Major::kMN>;
template <class T>
using Medium = ProductTile<T, 128, 128, 2, 6, Cluster::kNone, Major::kK, Major::kMN>;
template <class T>
using Small = ProductTile<T, 64, 64, 1, 8, Cluster::kNone, Major::kK, Major::kMN>;

// The time a tile takes is about its area over this.
constexpr double kSpeedNarrow = 0.94;
constexpr double kSpeedMedium = 0.8;
constexpr double kSpeedSmall = 0.5;

template <class Tile>
double Cost(const TileRows& tile, int32_t multiprocessors, double speed) {
  return static_cast<double>(Waves<Tile>(tile.rows, tile.hidden, multiprocessors)) * Tile::kBlockM *
         Tile::kBlockN / speed;
}

template <class T>
Result Multiply(const TileRows& tile, const void* exponentials, int64_t stride, DataType out_type, void* out,
                cudaStream_t stream) {
  InputGradientEpilogue<T> epilogue{};
  epilogue.out = out;
  epilogue.out_type = out_type;
  epilogue.out_stride = tile.hidden;
  epilogue.weight = static_cast<const T*>(tile.weight);
  epilogue.weight_stride = tile.padded_hidden;
  epilogue.scales = tile.scales;
  epilogue.target_gradients = tile.target_gradients;
  epilogue.labels = tile.labels;
  epilogue.batch_rows = tile.batch_rows;
  ProductShape shape;
  shape.m = tile.rows;
  shape.n = static_cast<int32_t>(tile.hidden);
  shape.k = static_cast<int32_t>(tile.vocab);
  shape.group = 16;
  const Operand e{exponentials, tile.vocab, tile.rows, stride};
  const Operand weight{tile.weight, tile.hidden, tile.vocab, tile.padded_hidden};
  int32_t multiprocessors = 0;
  LOSSD_CUDA_PASS_ON(Multiprocessors(&multiprocessors));
  const double large = Cost<Large<T>>(tile, multiprocessors, 1.0);
  const double narrow = Cost<Narrow<T>>(tile, multiprocessors, kSpeedNarrow);
  const double medium = Cost<Medium<T>>(tile, multiprocessors, kSpeedMedium);
  const double small = Cost<Small<T>>(tile, multiprocessors, kSpeedSmall);
  const double least = std::min({large, narrow, medium, small});
  if (least == small) return Launch<Small<T>>(e, weight, shape, epilogue, stream);
  if (least == narrow) return Launch<Narrow<T>>(e, weight, shape, epilogue, stream);
  if (least == medium) return Launch<Medium<T>>(e, weight, shape, epilogue, stream);
  return Launch<Large<T>>(e, weight, shape, epilogue, stream);
}

template <class T>
Result LoadAll() {
  return Load<InputGradientEpilogue<T>, Large<T>, Narrow<T>, Medium<T>, Small<T>>();
}

}  // namespace

Result LoadInputGradientKernels(DataType type) {
  return type == DataType::kBFloat16 ? LoadAll<__nv_bfloat16>() : LoadAll<__half>();
}

Result MultiplyInputGradient(const TileRows& tile, const void* exponentials, int64_t stride,
                             DataType out_type, void* out, cudaStream_t stream) {
  return tile.type == DataType::kBFloat16
             ? Multiply<__nv_bfloat16>(tile, exponentials, stride, out_type, out, stream)
             : Multiply<__half>(tile, exponentials, stride, out_type, out, stream);
}

}  // namespace lossd::kernels::cuda::sm90
