#include "kernels/cuda/sm90/input_gradient.cuh"

namespace lossd::kernels::cuda::sm90 {

double InputGradientCost(int64_t rows, int64_t hidden, int32_t multiprocessors) {
  return InputCosts(rows, hidden, multiprocessors).Least() * multiprocessors / static_cast<double>(hidden);
}

Result LoadInputGradientKernels(DataType type) {
  return type == DataType::kBFloat16 ? LoadInput<__nv_bfloat16, false>() : LoadInput<__half, false>();
}

Result MultiplyInputGradient(const TileRows& tile, const void* exponentials, int64_t stride,
                             DataType out_type, void* out, cudaStream_t stream) {
  if (tile.smoothing == Smoothing::kRankOne) {
    return MultiplySmoothedInputGradient(tile, exponentials, stride, out_type, out, stream);
  }
  return tile.type == DataType::kBFloat16
             ? MultiplyInput<__nv_bfloat16, false>(tile, exponentials, stride, out_type, out, stream)
             : MultiplyInput<__half, false>(tile, exponentials, stride, out_type, out, stream);
}

}  // namespace lossd::kernels::cuda::sm90
