// The product that makes dX, in every size.
#ifndef LOSSD_KERNELS_CUDA_SM90_INPUT_GRADIENT_CUH_
#define LOSSD_KERNELS_CUDA_SM90_INPUT_GRADIENT_CUH_

#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda::sm90 {

template <class T>
using LargeInput =
    ProductTile<T, 128, 256, 2, 4, Schedule::kCooperative, Cluster::kPair, Major::kK, Major::kMN>;
// For sizes that LargeInput fills the last wave badly with.
template <class T>
using NarrowInput =
    ProductTile<T, 128, 192, 2, 5, Schedule::kCooperative, Cluster::kPair, Major::kK, Major::kMN>;
template <class T>
using MediumInput =
    ProductTile<T, 128, 128, 2, 6, Schedule::kCooperative, Cluster::kNone, Major::kK, Major::kMN>;
template <class T>
using SmallInput =
    ProductTile<T, 64, 64, 1, 8, Schedule::kCooperative, Cluster::kNone, Major::kK, Major::kMN>;

// The time a tile takes is about its area over this.
inline constexpr double kSpeedNarrow = 0.94;
inline constexpr double kSpeedMedium = 0.8;
inline constexpr double kSpeedSmall = 0.5;

// For a multiprocessor, in elements of dX at the speed of LargeInput.
template <class Tile>
double InputCost(int64_t rows, int64_t hidden, int32_t multiprocessors, double speed) {
  return static_cast<double>(Waves<Tile>(rows, hidden, multiprocessors)) * Tile::kBlockM * Tile::kBlockN /
         speed;
}

// Tiles have the same sizes for both types.
struct InputCosts {
  InputCosts(int64_t rows, int64_t hidden, int32_t multiprocessors)
      : large(InputCost<LargeInput<__half>>(rows, hidden, multiprocessors, 1.0)),
        narrow(InputCost<NarrowInput<__half>>(rows, hidden, multiprocessors, kSpeedNarrow)),
        medium(InputCost<MediumInput<__half>>(rows, hidden, multiprocessors, kSpeedMedium)),
        small(InputCost<SmallInput<__half>>(rows, hidden, multiprocessors, kSpeedSmall)) {}
  double Least() const { return std::min({large, narrow, medium, small}); }

  double large;
  double narrow;
  double medium;
  double small;
};

template <class T, bool kSmoothed>
Result MultiplyInput(const TileRows& tile, const void* exponentials, int64_t stride, DataType out_type,
                     void* out, cudaStream_t stream) {
  InputGradientEpilogue<T, kSmoothed> epilogue{};
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
  epilogue.smoothing_factors = tile.smoothing_factors;
  epilogue.vocabulary_sum = tile.classes.vocabulary_sum;
  ProductShape shape;
  shape.m = tile.rows;
  shape.n = static_cast<int32_t>(tile.hidden);
  shape.k = static_cast<int32_t>(tile.vocab);
  shape.group = 8;
  const Operand e{exponentials, tile.vocab, tile.rows, stride};
  const Operand weight{tile.weight, tile.hidden, tile.vocab, tile.padded_hidden};
  int32_t multiprocessors = 0;
  LOSSD_CUDA_PASS_ON(Multiprocessors(&multiprocessors));
  const int32_t spared = tile.spared_multiprocessors;
  const InputCosts costs(tile.rows, tile.hidden, multiprocessors - spared);
  const double least = costs.Least();
  if (least == costs.small) return Launch<SmallInput<T>>(e, weight, shape, epilogue, spared, stream);
  if (least == costs.narrow) return Launch<NarrowInput<T>>(e, weight, shape, epilogue, spared, stream);
  if (least == costs.medium) return Launch<MediumInput<T>>(e, weight, shape, epilogue, spared, stream);
  return Launch<LargeInput<T>>(e, weight, shape, epilogue, spared, stream);
}

template <class T, bool kSmoothed>
Result LoadInput() {
  return Load<InputGradientEpilogue<T, kSmoothed>, LargeInput<T>, NarrowInput<T>, MediumInput<T>,
              SmallInput<T>>();
}

}  // namespace lossd::kernels::cuda::sm90

#endif  // LOSSD_KERNELS_CUDA_SM90_INPUT_GRADIENT_CUH_
