#include "kernels/cuda/row_kernels.cuh"
#include "kernels/cuda/row_returns.h"

namespace lossd::kernels::cuda {
namespace {

// Keys order like logits, and of equal ones like tokens from the last to the first: no two are the same.
using Key = uint64_t;

__device__ Key KeyOf(float logit, int64_t token) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 becomes 0
  const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
  return static_cast<Key>(ordered) << 32 | (0xFFFFFFFFU - static_cast<uint32_t>(token));
}
__device__ int32_t TokenOf(Key key) { return static_cast<int32_t>(0xFFFFFFFFU - static_cast<uint32_t>(key)); }
__device__ float LogitOf(Key key) {
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

__device__ Key LargestOfBlock(Key key) {
  __shared__ Key parts[kThreads / 32];
  for (int i = 16; i > 0; i /= 2) key = max(key, __shfl_xor_sync(0xFFFFFFFF, key, i));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = key;
  __syncthreads();
  for (const Key part : parts) key = max(key, part);
  return key;
}

// A key that exactly `count` of the row's keys are not below, found digit by digit from the highest on.
__device__ Key Threshold(const Logits& logits, int64_t vocab, int32_t count) {
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

// Largest first. `largest` and `log_sum` make up the log-sum-exp.
__device__ void TellTop(const RowReturns& returns, int32_t place, const Logits& logits, int64_t vocab,
                        float largest, double log_sum) {
  __shared__ Key top[kMostTopK];
  __shared__ int32_t found;
  const Key threshold = Threshold(logits, vocab, returns.top_k);
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  for (int64_t v = threadIdx.x; v < vocab; v += kThreads) {
    const Key key = logits.At(v);
    if (key >= threshold) top[atomicAdd(&found, 1)] = key;
  }
  __syncthreads();
  if (static_cast<int32_t>(threadIdx.x) >= returns.top_k) return;
  const Key own = top[threadIdx.x];
  int32_t rank = 0;
  for (int32_t i = 0; i < returns.top_k; ++i) rank += top[i] > own ? 1 : 0;
  const int64_t to = static_cast<int64_t>(place) * returns.top_k + rank;
  if (returns.top_tokens != nullptr) returns.top_tokens[to] = TokenOf(own);
  if (returns.top_log_probabilities != nullptr) {
    const double below = static_cast<double>(LogitOf(own)) - static_cast<double>(largest);
    returns.top_log_probabilities[to] = static_cast<float>(below - log_sum);
  }
}

__global__ void TellWholeRowsKernel(const TileRows tile, int32_t first, const float* sums, int64_t stride) {
  AwaitPreviousKernel();
  const int32_t row = first + static_cast<int32_t>(blockIdx.x);
  const int32_t place = tile.batch_rows[row];
  const RowReturns& returns = tile.returns;
  const Logits logits{sums + blockIdx.x * stride, tile.bias, tile.options};
  Key best = 0;
  for (int64_t v = threadIdx.x; v < tile.vocab; v += kThreads) best = max(best, logits.At(v));
  best = LargestOfBlock(best);
  const float largest = LogitOf(best);

  const int32_t label = tile.labels[row];
  const float own = logits[label];
  double sum = 0;
  double moment = 0;
  int32_t above = 0;
  for (int64_t v = threadIdx.x; v < tile.vocab; v += kThreads) {
    const float logit = logits[v];
    const float below = logit - largest;
    const float e = expf(below);
    sum += e;
    moment += static_cast<double>(e) * below;
    above += v != label && logit > own ? 1 : 0;
  }
  sum = SumOfBlock(sum);
  moment = SumOfBlock(moment);
  const double all_above = SumOfBlock(above);  // exact
  const double log_sum = log(sum);
  if (threadIdx.x == 0) {
    if (returns.prediction != nullptr) returns.prediction[place] = TokenOf(best);
    if (returns.target_rank != nullptr) returns.target_rank[place] = static_cast<int32_t>(all_above);
    if (returns.entropy != nullptr) returns.entropy[place] = static_cast<float>(log_sum - moment / sum);
  }
  if (returns.top_k > 0) TellTop(returns, place, logits, tile.vocab, largest, log_sum);
}

__global__ void ForgetOverflowedRowsKernel(const TileRows tile) {
  AwaitPreviousKernel();
  const auto row = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (row >= tile.rows || tile.overflowed[row] == 0) return;
  const int32_t place = tile.batch_rows[row];
  const RowReturns& returns = tile.returns;
  if (returns.entropy != nullptr) returns.entropy[place] = NaN();
  if (returns.prediction != nullptr) returns.prediction[place] = -1;
  if (returns.target_rank != nullptr) returns.target_rank[place] = -1;
  for (int32_t i = 0; i < returns.top_k; ++i) {
    const int64_t at = static_cast<int64_t>(place) * returns.top_k + i;
    if (returns.top_tokens != nullptr) returns.top_tokens[at] = -1;
    if (returns.top_log_probabilities != nullptr) returns.top_log_probabilities[at] = NaN();
  }
}

}  // namespace

Result TellWholeRows(const TileRows& tile, int32_t first, int32_t rows, const float* sums, int64_t stride,
                     cudaStream_t stream) {
  return LaunchRows("TellWholeRows", {Blocks(rows, 1)}, tile, stream, TellWholeRowsKernel, first, sums,
                    stride);
}

Result ForgetOverflowedRows(const TileRows& tile, cudaStream_t stream) {
  return LaunchRows("ForgetOverflowedRows", {Blocks(tile.rows, kThreads)}, tile, stream,
                    ForgetOverflowedRowsKernel);
}

Result LoadReturnKernels() {
  KernelLoader loader;
  loader.Add(&TellWholeRowsKernel);
  loader.Add(&ForgetOverflowedRowsKernel);
  return loader.result();
}

}  // namespace lossd::kernels::cuda
