#include "kernels/cuda/sm90/entry_epilogues.cuh"
#include "kernels/cuda/sm90/logits.cuh"

namespace lossd::kernels::cuda::sm90 {
namespace {

template <class T, EntryPass kPass>
EntryEpilogue<T, kPass> Describe(const TileRows& tile, Which which) {
  return {
      .gradients = nullptr,
      .stride = 0,
      .factors = tile.gradient_factors,
      .smoothings = tile.smoothing_factors,
      .spreads = tile.entropy_factors,
      .means = tile.means,
      .sums = nullptr,
      .logit_sums = nullptr,
      .moments = nullptr,
      .sums_stride = 0,
      .class_weights = tile.classes.weights,
      .bias = tile.bias,
      .offsets = tile.offsets,
      .exponents = tile.exponents,
      .labels = tile.labels,
      .row_map = which == Which::kRedo ? tile.redo_rows : nullptr,
      .logit_scale = tile.options.logit_scale,
      .cap = FastLogitCap(tile.options.softcap),
  };
}

template <class T>
Result Sum(const TileRows& tile, Which which, const EntrySums& out, cudaStream_t stream) {
  auto epilogue = Describe<T, EntryPass::kSums>(tile, which);
  epilogue.sums = out.exponentials;
  epilogue.logit_sums = out.logits;
  epilogue.moments = out.moments;
  epilogue.sums_stride = out.stride;
  return LaunchLogits<T, LogitTiles::kUpToMedium>(tile, which, epilogue, stream);
}

template <class T>
Result Form(const TileRows& tile, void* gradients, int64_t stride, cudaStream_t stream) {
  auto epilogue = Describe<T, EntryPass::kGradient>(tile, Which::kAll);
  epilogue.gradients = static_cast<T*>(gradients);
  epilogue.stride = stride;
  return LaunchLogits<T, LogitTiles::kUpToMedium>(tile, Which::kAll, epilogue, stream);
}

template <class T>
Result StoreAll(const TileRows& tile, float* sums, int64_t stride, cudaStream_t stream) {
  return LaunchLogits<T>(tile, Which::kAll, PlainEpilogue{.out = sums, .stride = stride}, stream);
}

template <class T>
Result LoadAll() {
  LOSSD_CUDA_PASS_ON((LoadLogits<T, EntryEpilogue<T, EntryPass::kSums>, LogitTiles::kUpToMedium>()));
  LOSSD_CUDA_PASS_ON((LoadLogits<T, EntryEpilogue<T, EntryPass::kGradient>, LogitTiles::kUpToMedium>()));
  return LoadLogits<T, PlainEpilogue>();
}

}  // namespace

Result LoadEntryKernels(DataType type) {
  return type == DataType::kBFloat16 ? LoadAll<__nv_bfloat16>() : LoadAll<__half>();
}

Result SumEntries(const TileRows& tile, Which which, const EntrySums& out, cudaStream_t stream) {
  return tile.type == DataType::kBFloat16 ? Sum<__nv_bfloat16>(tile, which, out, stream)
                                          : Sum<__half>(tile, which, out, stream);
}

Result FormEntries(const TileRows& tile, void* gradients, int64_t stride, cudaStream_t stream) {
  return tile.type == DataType::kBFloat16 ? Form<__nv_bfloat16>(tile, gradients, stride, stream)
                                          : Form<__half>(tile, gradients, stride, stream);
}

Result StoreLogits(const TileRows& tile, float* sums, int64_t stride, cudaStream_t stream) {
  return tile.type == DataType::kBFloat16 ? StoreAll<__nv_bfloat16>(tile, sums, stride, stream)
                                          : StoreAll<__half>(tile, sums, stride, stream);
}

}  // namespace lossd::kernels::cuda::sm90
