// The sum of what ranks sent, in the order of the ranks: its bits depend on nothing that happens in time.
#ifndef LOSSD_KERNELS_COLLECTIVES_RANK_ORDER_SUM_H_
#define LOSSD_KERNELS_COLLECTIVES_RANK_ORDER_SUM_H_

#include <cstdint>

#include "kernels/collectives/result.h"

namespace lossd::kernels::collectives {

// sum[i] = ((part_0[i] + part_1[i]) + part_2[i]) + ..., in fp32, for i < count. part_rank is `own`; the
// others lie in `received`, in the order of their ranks without `rank`, `count` floats each.
struct RankOrderSum {
  const float* own;
  const float* received;  // [ranks - 1, count]
  int rank;
  int ranks;
  int64_t count;
  float* sum;  // may be `own`; must not overlap it otherwise, nor `received`
};

void SumInRankOrder(const RankOrderSum& sum);

// The same bits from a GPU: pointers are of the current device, `stream` is a cudaStream_t, and the sum is
// ready when the stream is. It takes few thread blocks, so that it can run beside a product. Only where CUDA
// code is built.
Result SumInRankOrderOnDevice(const RankOrderSum& sum, void* stream);

}  // namespace lossd::kernels::collectives

#endif  // LOSSD_KERNELS_COLLECTIVES_RANK_ORDER_SUM_H_
