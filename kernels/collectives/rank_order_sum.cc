#include "kernels/collectives/rank_order_sum.h"

#include <algorithm>

namespace lossd::kernels::collectives {
namespace {

// A block of the sum stays in the nearest cache while the ranks are added to it.
constexpr int64_t kBlock = 2048;

}  // namespace

void SumInRankOrder(const RankOrderSum& sum) {
  float block[kBlock];
  for (int64_t first = 0; first < sum.count; first += kBlock) {
    const int64_t length = std::min(kBlock, sum.count - first);
    for (int rank = 0; rank < sum.ranks; ++rank) {
      const int64_t place = rank < sum.rank ? rank : rank - 1;
      const float* part = (rank == sum.rank ? sum.own : sum.received + place * sum.count) + first;
      if (rank == 0) {
        std::copy_n(part, length, block);
      } else {
        for (int64_t i = 0; i < length; ++i) block[i] += part[i];
      }
    }
    std::copy_n(block, length, sum.sum + first);
  }
}

}  // namespace lossd::kernels::collectives
