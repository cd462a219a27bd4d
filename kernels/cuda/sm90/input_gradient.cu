#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda::sm90 {
namespace {

template <class T>
using Large = ProductTile<T, 128, 256, 2, 4, Schedule::kCooperative, Cluster::kPair, Major::kK, Major::kMN>;
// For sizes that Large fills the last wave badly with.
template <class T>
using Narrow = ProductTile<T, 128, 192, 2, 5, Schedule::kCooperative, Cluster::kPair, Major::kK, Major::kMN>;
template <class T>
using Medium = ProductTile<T, 128, 128, 2, 6, Schedule::kCooperative, Cluster::kNone, Major::kK, Major::kMN>;
template <class T>
using Small = ProductTile<T, 64, 64, 1, 8, Schedule::kCooperative, Cluster::kNone, Major::kK, Major::kMN>;

// The time a tile takes is about its area over this.
constexpr double kSpeedNarrow = 0.94;
constexpr double kSpeedMedium = 0.8;
constexpr double kSpeedSmall = 0.5;

// For a multiprocessor, in elements of dX at the speed of Large.
template <class Tile>
double Cost(int64_t rows, int64_t hidden, int32_t multiprocessors, double speed) {
  return static_cast<double>(Waves<Tile>(rows, hidden, multiprocessors)) * Tile::kBlockM * Tile::kBlockN /
         speed;
}

// Tiles have the same sizes for both types.
struct Costs {
  Costs(int64_t rows, int64_t hidden, int32_t multiprocessors)
      : large(Cost<Large<__half>>(rows, hidden, multiprocessors, 1.0)),
        narrow(Cost<Narrow<__half>>(rows, hidden, multiprocessors, kSpeedNarrow)),
        medium(Cost<Medium<__half>>(rows, hidden, multiprocessors, kSpeedMedium)),
        small(Cost<Small<__half>>(rows, hidden, multiprocessors, kSpeedSmall)) {}
  double Least() const { return std::min({large, narrow, medium, small}); }

  double large;
  double narrow;
  double medium;
  double small;
};

template <class T>
Result Multiply(const TileRows& tile, const void* exponentials, int64_t stride, DataType out_type, void* out,
                cudaStream_t stream) {
  InputGradientEpilogue<T> epilogue{};
  epilogue.out = out;
  epilogue.out_type = out_type;
  epilogue.out_stride = tile.hidden;
  epilogue.out_in_fours =
      tile.hidden % 4 == 0 &&
      reinterpret_cast<uintptr_t>(out) % static_cast<uintptr_t>(4 * SizeOf(out_type)) == 0;
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
  shape.group = 8;
  const Operand e{exponentials, tile.vocab, tile.rows, stride};
  const Operand weight{tile.weight, tile.hidden, tile.vocab, tile.padded_hidden};
  int32_t multiprocessors = 0;
  LOSSD_CUDA_PASS_ON(Multiprocessors(&multiprocessors));
  const Costs costs(tile.rows, tile.hidden, multiprocessors);
  const double least = costs.Least();
  if (least == costs.small) return Launch<Small<T>>(e, weight, shape, epilogue, stream);
  if (least == costs.narrow) return Launch<Narrow<T>>(e, weight, shape, epilogue, stream);
  if (least == costs.medium) return Launch<Medium<T>>(e, weight, shape, epilogue, stream);
  return Launch<Large<T>>(e, weight, shape, epilogue, stream);
}

template <class T>
Result LoadAll() {
  return Load<InputGradientEpilogue<T>, Large<T>, Narrow<T>, Medium<T>, Small<T>>();
}

}  // namespace

double InputGradientCost(int64_t rows, int64_t hidden, int32_t multiprocessors) {
  return Costs(rows, hidden, multiprocessors).Least() * multiprocessors / static_cast<double>(hidden);
}

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
