// Launching products.
#ifndef LOSSD_KERNELS_CUDA_SM90_LAUNCH_CUH_
#define LOSSD_KERNELS_CUDA_SM90_LAUNCH_CUH_

#include <algorithm>

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/memory/tensor_map.h"
#include "kernels/cuda/rows/dependent_launch.cuh"
#include "kernels/cuda/sm90/epilogues.cuh"
#include "kernels/cuda/sm90/product.cuh"
#include "kernels/rounding.h"

namespace lossd::kernels::cuda::sm90 {

template <class T>
inline constexpr DataType kDataType = DataType::kBFloat16;
template <>
inline constexpr DataType kDataType<__half> = DataType::kFloat16;

inline Result Multiprocessors(int32_t* count) {
  int device = 0;
  LOSSD_CUDA_TRY(cudaGetDevice(&device));
  int value = 0;
  LOSSD_CUDA_TRY(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device));
  *count = value;
  return {};
}

// A row-major operand in memory.
struct Operand {
  const void* data = nullptr;
  int64_t inner = 0;
  int64_t outer = 0;
  int64_t stride = 0;
};

// Tiles of a product, each the work of one cluster.
template <class Tile>
int64_t ClusterTiles(int64_t m, int64_t n) {
  return CeilDivide(m, Tile::kBlockM * Tile::kBlocks) * CeilDivide(n, Tile::kBlockN);
}

// The same in waves of what the device takes at once.
template <class Tile>
int64_t Waves(int64_t m, int64_t n, int64_t multiprocessors) {
  return CeilDivide(ClusterTiles<Tile>(m, n), multiprocessors / Tile::kBlocks);
}

// `spared` multiprocessors are left alone.
template <class Tile, class Epilogue>
Result Launch(const Operand& a, const Operand& b, const ProductShape& shape, const Epilogue& epilogue,
              int32_t spared, cudaStream_t stream) {
  using T = typename Tile::T;
  CUtensorMap map_a;
  CUtensorMap map_b;
  LOSSD_CUDA_PASS_ON(MakeTensorMap(kDataType<T>, a.data, a.inner, a.outer, a.stride, Tile::kBoxInner,
                                   Tile::kBoxOuterA, &map_a));
  LOSSD_CUDA_PASS_ON(MakeTensorMap(kDataType<T>, b.data, b.inner, b.outer, b.stride, Tile::kBoxInner,
                                   Tile::kBoxOuterB, &map_b));
  const auto kernel = ProductKernel<Tile, Epilogue>;
  LOSSD_CUDA_TRY(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes));
  int32_t multiprocessors = 0;
  LOSSD_CUDA_PASS_ON(Multiprocessors(&multiprocessors));
  const int64_t clusters = ClusterTiles<Tile>(shape.m, shape.n);
  cudaLaunchConfig_t config{};
  const int64_t most = std::max(multiprocessors - spared, int32_t{Tile::kBlocks}) / Tile::kBlocks;
  config.gridDim = dim3(static_cast<unsigned>(std::min(clusters, most) * Tile::kBlocks));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {DependentLaunch(), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = Tile::kBlocks;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  LOSSD_CUDA_TRY(cudaLaunchKernelEx(&config, kernel, map_a, map_b, shape, epilogue));
  return {};
}

// Loads the code of one kernel for each tile: left to itself, the driver does that at the first launch, when
// there may be no memory left for it.
template <class Epilogue, class... Tiles>
Result Load() {
  Result result;
  const auto load = [&result](auto* kernel) {
    cudaFuncAttributes attributes{};
    if (result.ok()) result = {cudaFuncGetAttributes(&attributes, kernel), "loading a product's kernel"};
  };
  (load(&ProductKernel<Tiles, Epilogue>), ...);
  return result;
}

}  // namespace lossd::kernels::cuda::sm90

#endif  // LOSSD_KERNELS_CUDA_SM90_LAUNCH_CUH_
