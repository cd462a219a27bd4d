#include "kernels/cuda/sm90/input_gradient.cuh"

namespace lossd::kernels::cuda::sm90 {

Result LoadSmoothedInputGradientKernels(DataType type) {
  return type == DataType::kBFloat16 ? LoadInput<__nv_bfloat16, true>() : LoadInput<__half, true>();
}

Result MultiplySmoothedInputGradient(const TileRows& tile, const void* exponentials, int64_t stride,
                                     DataType out_type, void* out, cudaStream_t stream) {
  return tile.type == DataType::kBFloat16
             ? MultiplyInput<__nv_bfloat16, true>(tile, exponentials, stride, out_type, out, stream)
             : MultiplyInput<__half, true>(tile, exponentials, stride, out_type, out, stream);
}

}  // namespace lossd::kernels::cuda::sm90
