// A row's logits in one total order, and the largest of them.
#ifndef LOSSD_KERNELS_CUDA_ROWS_LARGEST_LOGITS_CUH_
#define LOSSD_KERNELS_CUDA_ROWS_LARGEST_LOGITS_CUH_

#include "kernels/cuda/rows/row_kernels.cuh"
#include "kernels/cuda/rows/row_parts.h"

namespace lossd::kernels::cuda {

// Keys order like logits, and of equal ones like tokens from the last to the first: no two are the same, and
// none is 0.
__device__ inline Key KeyOf(float logit, int64_t token) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 becomes 0
  const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
  return static_cast<Key>(ordered) << 32 | (0xFFFFFFFFU - static_cast<uint32_t>(token));
}
__device__ inline int32_t TokenOf(Key key) {
  return static_cast<int32_t>(0xFFFFFFFFU - static_cast<uint32_t>(key));
}
// The key of the same logit where tokens are numbered from `entries` entries before.
__device__ inline Key Renumbered(Key key, int64_t entries) { return key - static_cast<Key>(entries); }
__device__ inline float LogitOf(Key key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float((ordered >> 31) != 0 ? ordered & 0x7FFFFFFFU : ~ordered);
}

// A row's logits, made from the product's sums whenever they are read.
struct Logits {
  const float* sums;
  const float* bias;
  LossOptions options;

  __device__ float operator[](int64_t token) const {
    const float sum = bias == nullptr ? sums[token] : __fadd_rn(sums[token], bias[token]);
    return TransformLogit(sum, options).value;
  }
  __device__ Key At(int64_t token) const { return KeyOf((*this)[token], token); }
};

__device__ inline Key LargestOfBlock(Key key) {
  __shared__ Key parts[kThreads / 32];
  for (int i = 16; i > 0; i /= 2) key = max(key, __shfl_xor_sync(0xFFFFFFFF, key, i));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = key;
  __syncthreads();
  for (const Key part : parts) key = max(key, part);
  return key;
}

// A key that exactly `count` of the row's keys are not below, found digit by digit from the highest on.
__device__ inline Key Threshold(const Logits& logits, int64_t vocab, int32_t count) {
  constexpr int kDigit = 8;
  constexpr Key kDigitMask = (1U << kDigit) - 1;
  __shared__ uint32_t histogram[1 << kDigit];
  static_assert((1 << kDigit) == kThreads);
  Key prefix = 0;
  Key mask = 0;
  auto wanted = static_cast<uint32_t>(count);  // among the keys that begin with the prefix
  for (int shift = 64 - kDigit; shift >= 0; shift -= kDigit) {
    __syncthreads();
    histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t v = threadIdx.x; v < vocab; v += kThreads) {
      const Key key = logits.At(v);
      if ((key & mask) == prefix) atomicAdd(&histogram[(key >> shift) & kDigitMask], 1U);
    }
    __syncthreads();
    auto digit = static_cast<int>(kDigitMask);
    for (; histogram[digit] < wanted; --digit) wanted -= histogram[digit];
    prefix |= static_cast<Key>(digit) << shift;
    mask |= kDigitMask << shift;
    if (histogram[digit] == wanted) break;
  }
  return prefix;
}

// Calls tell(place, key) for the `count` largest, place 0 the largest of all; each in another thread.
template <class Tell>
__device__ void ForEachLargest(const Logits& logits, int64_t vocab, int32_t count, const Tell& tell) {
  __shared__ Key top[kMostTopK];
  __shared__ int32_t found;
  const Key threshold = Threshold(logits, vocab, count);
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  for (int64_t v = threadIdx.x; v < vocab; v += kThreads) {
    const Key key = logits.At(v);
    if (key >= threshold) top[atomicAdd(&found, 1)] = key;
  }
  __syncthreads();
  if (static_cast<int32_t>(threadIdx.x) >= count) return;
  const Key own = top[threadIdx.x];
  int32_t place = 0;
  for (int32_t i = 0; i < count; ++i) place += top[i] > own ? 1 : 0;
  tell(place, own);
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_LARGEST_LOGITS_CUH_
