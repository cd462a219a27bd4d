#include "client/examples/train_lm/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>

namespace lossd::train_lm::thread_pool_test {
namespace {

TEST(ThreadPool, CoversEveryIndexOnceRoundAfterRound) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 7, 64, 1000}) {
      std::vector<int> visits(static_cast<size_t>(count));
      pool.For(count, 16, [&](int64_t begin, int64_t end) {
        EXPECT_LT(begin, end);
        EXPECT_EQ(begin % 16, 0);
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
      });
      for (const int visit : visits) EXPECT_EQ(visit, 1);
    }
  }
}

TEST(ThreadPool, ReturnsOnlyWhenAllRangesAreDone) {
  ThreadPool pool(4);
  for (int round = 0; round < 1000; ++round) {
    std::atomic<int> done = 0;
    pool.For(4, 1, [&](int64_t, int64_t) { ++done; });
    ASSERT_EQ(done, 4);
  }
}

}  // namespace
}  // namespace lossd::train_lm::thread_pool_test
