#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bench/kernels/cuda/cuda_random.h"

namespace lossd::bench {
namespace {

// The finaliser of SplitMix64.
__device__ uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

template <class T>
__global__ void FillNormalKernel(T* values, int64_t count, float deviation, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint64_t bits = Mix(static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15 + Mix(seed));
    const float u = static_cast<float>((bits >> 40) + 1) * 0x1p-24f;
    const float v = static_cast<float>((bits >> 8) & 0xFFFFFF) * 0x1p-24f;
    values[i] = static_cast<T>(deviation * sqrtf(-2 * logf(u)) * cospif(2 * v));  // Box and Muller
  }
}

}  // namespace

kernels::cuda::Result FillNormal(kernels::DataType type, void* values, int64_t count, float deviation,
                                 uint64_t seed) {
  constexpr int kBlocks = 1024;
  constexpr int kThreads = 256;
  switch (type) {
    case kernels::DataType::kFloat32:
      FillNormalKernel<<<kBlocks, kThreads>>>(static_cast<float*>(values), count, deviation, seed);
      break;
    case kernels::DataType::kBFloat16:
      FillNormalKernel<<<kBlocks, kThreads>>>(static_cast<__nv_bfloat16*>(values), count, deviation, seed);
      break;
    case kernels::DataType::kFloat16:
      FillNormalKernel<<<kBlocks, kThreads>>>(static_cast<__half*>(values), count, deviation, seed);
      break;
  }
  return {cudaGetLastError(), "FillNormal"};
}

}  // namespace lossd::bench
