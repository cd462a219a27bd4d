#include "kernels/collectives/rank_order_sum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace lossd::kernels::collectives::rank_order_sum_test {
namespace {

// Ranks whose sums depend on their order: 2^24 swallows a single 1.
float Part(int rank, int64_t i) { return (rank + i) % 3 == 0 ? 0x1p24f : 1.0f + static_cast<float>(i % 7); }

TEST(RankOrderSumTest, AddsWhateverRankIsItsOwn) {
  for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{2048}, int64_t{5001}}) {
    for (const int ranks : {1, 2, 5}) {
      std::vector<float> expected;
      for (int64_t i = 0; i < count; ++i) {
        float sum = Part(0, i);
        for (int rank = 1; rank < ranks; ++rank) sum += Part(rank, i);
        expected.push_back(sum);
      }
      for (int own = 0; own < ranks; ++own) {
        std::vector<float> mine;
        std::vector<float> received;
        for (int rank = 0; rank < ranks; ++rank) {
          std::vector<float>& to = rank == own ? mine : received;
          for (int64_t i = 0; i < count; ++i) to.push_back(Part(rank, i));
        }
        SumInRankOrder({.own = mine.data(),
                        .received = received.data(),
                        .rank = own,
                        .ranks = ranks,
                        .count = count,
                        .sum = mine.data()});
        EXPECT_EQ(mine, expected) << "rank " << own << " of " << ranks << ", " << count;
      }
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::collectives::rank_order_sum_test
