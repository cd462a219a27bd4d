#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "kernels/collectives/rank_order_sum.h"

namespace lossd::kernels::collectives {
namespace {

constexpr int kThreads = 256;
// The sum waits for memory and links, not for multiprocessors: these leave most of them to a product.
constexpr int kMostBlocks = 64;

__device__ float Plus(float a, float b) { return __fadd_rn(a, b); }
__device__ float4 Plus(float4 a, float4 b) {
  return {Plus(a.x, b.x), Plus(a.y, b.y), Plus(a.z, b.z), Plus(a.w, b.w)};
}

// Pointers and count are in units of Value, which is float or float4.
template <class Value>
__global__ void __launch_bounds__(kThreads)
    AddParts(const Value* own, const Value* received, int own_rank, int ranks, int64_t count, Value* sum) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    Value total = own_rank == 0 ? own[i] : received[i];
    for (int rank = 1; rank < ranks; ++rank) {
      const int64_t place = rank < own_rank ? rank : rank - 1;
      total = Plus(total, rank == own_rank ? own[i] : received[place * count + i]);
    }
    sum[i] = total;
  }
}

template <class Value>
void Launch(const RankOrderSum& sum, cudaStream_t stream) {
  const int64_t count = sum.count * static_cast<int64_t>(sizeof(float)) / static_cast<int64_t>(sizeof(Value));
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, kMostBlocks));
  AddParts<Value><<<blocks, kThreads, 0, stream>>>(reinterpret_cast<const Value*>(sum.own),
                                                   reinterpret_cast<const Value*>(sum.received), sum.rank,
                                                   sum.ranks, count, reinterpret_cast<Value*>(sum.sum));
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(float4) == 0; }

}  // namespace

Result SumInRankOrderOnDevice(const RankOrderSum& sum, void* stream) {
  if (sum.count == 0) return {};
  const auto on = static_cast<cudaStream_t>(stream);
  if (sum.count % 4 == 0 && IsAligned(sum.own) && IsAligned(sum.received) && IsAligned(sum.sum)) {
    Launch<float4>(sum, on);
  } else {
    Launch<float>(sum, on);
  }
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return {};
  return {Code::kFailed, std::string("starting the sum in rank order: ") + cudaGetErrorString(status)};
}

}  // namespace lossd::kernels::collectives
