#include "kernels/cuda/sm90/logits.cuh"

namespace lossd::kernels::cuda::sm90 {
namespace {

template <class T>
Result Multiply(const TileRows& tile, Which which, const Exponentials& out, cudaStream_t stream) {
  if (tile.options.logit_scale == 1.0f && tile.bias == nullptr) {
    return MultiplyExponentials<T, Transform::kNone, true>(tile, which, out, stream);
  }
  return MultiplyExponentials<T, Transform::kScale, true>(tile, which, out, stream);
}

template <class T>
Result LoadAll() {
  LOSSD_CUDA_PASS_ON((LoadLogits<T, ExponentialsEpilogue<T, Transform::kNone, true>>()));
  return LoadLogits<T, ExponentialsEpilogue<T, Transform::kScale, true>>();
}

}  // namespace

Result LoadMomentLogitKernels(DataType type) {
  return type == DataType::kBFloat16 ? LoadAll<__nv_bfloat16>() : LoadAll<__half>();
}

Result MultiplyMomentLogits(const TileRows& tile, Which which, const Exponentials& out, cudaStream_t stream) {
  return tile.type == DataType::kBFloat16 ? Multiply<__nv_bfloat16>(tile, which, out, stream)
                                          : Multiply<__half>(tile, which, out, stream);
}

}  // namespace lossd::kernels::cuda::sm90
