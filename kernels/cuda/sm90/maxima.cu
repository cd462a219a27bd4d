#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda::sm90 {
namespace {

constexpr int64_t kNarrowColumns = 64;
constexpr int64_t kLargeColumns = 192;

// For all rows and the whole vocabulary, which only fp16 heads need.
using Large = ProductTile<__half, 256, kLargeColumns, 2, 4, Schedule::kCooperative, Cluster::kPair, Major::kK,
                          Major::kK>;
// Few columns, so that a sample of the vocabulary, or a few rows, still keep the device busy.
template <class T>
using Narrow =
    ProductTile<T, 128, kNarrowColumns, 2, 8, Schedule::kCooperative, Cluster::kNone, Major::kK, Major::kK>;

int64_t SampledRows(int64_t vocab) { return std::min(vocab, kSampleRows); }

template <class T>
Result Find(const TileRows& tile, Which which, Maximum maximum, float* maxima, int64_t stride,
            cudaStream_t stream) {
  const bool redo = which == Which::kRedo;
  MaximumEpilogue epilogue{};
  epilogue.maxima = maxima;
  epilogue.stride = stride;
  // Every `step`-th entry of the vocabulary is a column.
  const int64_t sampled = maximum == Maximum::kOfSample ? SampledRows(tile.vocab) : tile.vocab;
  const int64_t step = tile.vocab / sampled;
  epilogue.bias = tile.bias;
  epilogue.bias_step = step;
  ProductShape shape;
  shape.m = tile.rows;
  shape.n = static_cast<int32_t>(sampled);
  shape.k = static_cast<int32_t>(tile.hidden);
  shape.group = 64;
  shape.device_m = redo ? tile.redo_count : nullptr;
  const Operand x{redo ? tile.scaled_x : tile.x, tile.hidden, tile.rows, tile.padded_hidden};
  const Operand weight{tile.weight, tile.hidden, sampled, step * tile.padded_hidden};
  if constexpr (kDataType<T> == DataType::kFloat16) {
    if (which == Which::kAll && maximum == Maximum::kOfAll) {
      shape.group = 8;
      return Launch<Large>(x, weight, shape, epilogue, tile.spared_multiprocessors, stream);
    }
  }
  return Launch<Narrow<T>>(x, weight, shape, epilogue, tile.spared_multiprocessors, stream);
}

}  // namespace

int32_t MaximumTiles(int64_t vocab, Which which, Maximum maximum) {
  if (maximum == Maximum::kOfSample)
    return static_cast<int32_t>(CeilDivide(SampledRows(vocab), kNarrowColumns));
  return static_cast<int32_t>(CeilDivide(vocab, which == Which::kAll ? kLargeColumns : kNarrowColumns));
}

int64_t MostMaximumTiles(int64_t vocab) { return CeilDivide(vocab, kNarrowColumns); }

Result LoadMaximumKernels(DataType type) {
  return type == DataType::kBFloat16 ? Load<MaximumEpilogue, Narrow<__nv_bfloat16>>()
                                     : Load<MaximumEpilogue, Narrow<__half>, Large>();
}

Result FindMaxima(const TileRows& tile, Which which, Maximum maximum, float* maxima, int64_t stride,
                  cudaStream_t stream) {
  return tile.type == DataType::kBFloat16 ? Find<__nv_bfloat16>(tile, which, maximum, maxima, stride, stream)
                                          : Find<__half>(tile, which, maximum, maxima, stride, stream);
}

}  // namespace lossd::kernels::cuda::sm90
