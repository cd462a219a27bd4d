#include <algorithm>
#include <cstdint>

#include "kernels/cuda/optimizer/blend.h"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

// Blocks at most, each of which takes one part of the elements after the other.
constexpr int64_t kMostBlocks = 16384;

unsigned GridOver(int64_t count) {
  return std::min(Blocks(count, kThreads), static_cast<unsigned>(kMostBlocks));
}

// Calls element(i) for those of this thread, neighbours in neighbouring threads.
template <class Element>
__device__ void ForEachElement(int64_t count, const Element& element) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 4
  for (int64_t i = first; i < count; i += step) element(i);
}

template <class Weight, class Source>
__global__ void __launch_bounds__(kThreads)
    BlendKernel(const Source* __restrict__ source, int64_t count, const BlendFactors factors,
                Weight* __restrict__ weight) {
  ForEachElement(count, [=](int64_t i) {
    weight[i] = static_cast<Weight>(Blended(factors, Widen(weight[i]), Widen(source[i])));
  });
}

template <class Weight, class Source>
__global__ void __launch_bounds__(kThreads)
    BlendMasterKernel(const Source* __restrict__ source, int64_t count, const BlendFactors factors,
                      float* __restrict__ master, Weight* __restrict__ weight) {
  ForEachElement(count, [=](int64_t i) {
    const float blended = Blended(factors, master[i], Widen(source[i]));
    master[i] = blended;
    weight[i] = static_cast<Weight>(blended);
  });
}

template <class Weight>
__global__ void __launch_bounds__(kThreads)
    WidenKernel(const Weight* __restrict__ weight, int64_t count, float* __restrict__ master) {
  ForEachElement(count, [=](int64_t i) { master[i] = Widen(weight[i]); });
}

template <class Weight, class Source>
void LaunchBlend(const BlendTarget& target, const Source* source, const BlendFactors& factors,
                 cudaStream_t stream) {
  auto* const weight = static_cast<Weight*>(target.weight);
  const unsigned grid = GridOver(target.count);
  if constexpr (sizeof(Weight) == 2) {
    if (target.master != nullptr) {
      BlendMasterKernel<<<grid, kThreads, 0, stream>>>(source, target.count, factors, target.master, weight);
      return;
    }
  }
  BlendKernel<<<grid, kThreads, 0, stream>>>(source, target.count, factors, weight);
}

}  // namespace

Result Blend(const BlendTarget& target, const BlendSource& source, const BlendFactors& factors,
             cudaStream_t stream) {
  WithType(target.weight_type, [&](auto element) {
    using Weight = decltype(element);
    if (source.type == DataType::kFloat32) {
      LaunchBlend<Weight>(target, static_cast<const float*>(source.values), factors, stream);
    } else {
      LaunchBlend<Weight>(target, static_cast<const Weight*>(source.values), factors, stream);
    }
  });
  return {cudaGetLastError(), "Blend"};
}

Result WidenWeights(DataType weight_type, const void* weight, int64_t count, float* master,
                    cudaStream_t stream) {
  WithType(weight_type, [&](auto element) {
    using Weight = decltype(element);
    WidenKernel<<<GridOver(count), kThreads, 0, stream>>>(static_cast<const Weight*>(weight), count, master);
  });
  return {cudaGetLastError(), "WidenWeights"};
}

Result LoadBlendKernels(DataType weight_type) {
  KernelLoader loader;
  WithType(weight_type, [&loader](auto element) {
    using Weight = decltype(element);
    loader.Add(&BlendKernel<Weight, Weight>);
    loader.Add(&WidenKernel<Weight>);
    if constexpr (sizeof(Weight) == 2) {
      loader.Add(&BlendKernel<Weight, float>);
      loader.Add(&BlendMasterKernel<Weight, Weight>);
      loader.Add(&BlendMasterKernel<Weight, float>);
    }
  });
  loader.Add(&BlendKernel<float, float>);  // of the bias
  return loader.result();
}

}  // namespace lossd::kernels::cuda
