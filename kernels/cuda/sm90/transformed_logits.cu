#include "kernels/cuda/sm90/logits.cuh"

namespace lossd::kernels::cuda::sm90 {
namespace {

template <class T>
Result Multiply(const TileRows& tile, Which which, const Exponentials& out, cudaStream_t stream) {
  return tile.options.softcap == 0 ? MultiplyExponentials<T, Transform::kScale>(tile, which, out, stream)
                                   : MultiplyExponentials<T, Transform::kCap>(tile, which, out, stream);
}

template <class T>
Result LoadAll() {
  LOSSD_CUDA_PASS_ON((LoadLogits<T, ExponentialsEpilogue<T, Transform::kScale>>()));
  return LoadLogits<T, ExponentialsEpilogue<T, Transform::kCap>>();
}

}  // namespace

Result LoadTransformedLogitKernels(DataType type) {
  return type == DataType::kBFloat16 ? LoadAll<__nv_bfloat16>() : LoadAll<__half>();
}

Result MultiplyTransformedLogits(const TileRows& tile, Which which, const Exponentials& out,
                                 cudaStream_t stream) {
  return tile.type == DataType::kBFloat16 ? Multiply<__nv_bfloat16>(tile, which, out, stream)
                                          : Multiply<__half>(tile, which, out, stream);
}

}  // namespace lossd::kernels::cuda::sm90
