#include "kernels/cuda/sm90/logits.cuh"

namespace lossd::kernels::cuda::sm90 {
namespace {

template <class T>
Result Multiply(const TileRows& tile, Which which, const Exponentials& out, cudaStream_t stream) {
  return MultiplyExponentials<T, Transform::kNone>(tile, which, out, stream);
}

template <class T>
Result LoadAll() {
  return LoadLogits<T, ExponentialsEpilogue<T, Transform::kNone>>();
}

}  // namespace

Result LoadLogitKernels(DataType type) {
  return type == DataType::kBFloat16 ? LoadAll<__nv_bfloat16>() : LoadAll<__half>();
}

Result MultiplyLogits(const TileRows& tile, Which which, const Exponentials& out, cudaStream_t stream) {
  if (out.moments != nullptr) return MultiplyMomentLogits(tile, which, out, stream);
  const LossOptions& options = tile.options;
  if (options.logit_scale != 1.0f || options.softcap != 0 || tile.bias != nullptr) {
    return MultiplyTransformedLogits(tile, which, out, stream);
  }
  return tile.type == DataType::kBFloat16 ? Multiply<__nv_bfloat16>(tile, which, out, stream)
                                          : Multiply<__half>(tile, which, out, stream);
}

}  // namespace lossd::kernels::cuda::sm90
