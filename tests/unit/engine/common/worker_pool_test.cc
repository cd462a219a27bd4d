#include "server/engine/common/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/engine/common/errors.h"
#include "tests/support/wait.h"

namespace lossd::engine::worker_pool_test {
namespace {

TEST(WorkerPool, RefusesCallsBeyondItsQueueWithADelayAndTakesThemAgainLater) {
  absl::Notification let_go;
  std::promise<void> begun;
  std::atomic<size_t> ran = 0;
  WorkerPool pool(1);
  ASSERT_TRUE(pool.TryRun([&] {
                    begun.set_value();
                    testing::Await("the word to go on", let_go);
                    ++ran;
                  })
                  .ok());
  testing::Await("the first task", begun);  // it is under way and waits no more
  for (size_t i = 0; i < WorkerPool::kMostWaiting; ++i) {
    ASSERT_TRUE(pool.TryRun([&] { ++ran; }).ok()) << i;
  }
  const absl::Time before = absl::Now();
  const absl::Status refused = pool.TryRun([&] { ran += 1000; });
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  const auto delay = engine::RetryDelayOf(refused);
  ASSERT_TRUE(delay.has_value());
  for (int i = 0; i < 99; ++i) (void)pool.TryRun([&] { ran += 1000; });
  const auto later = engine::RetryDelayOf(pool.TryRun([&] { ran += 1000; }));
  ASSERT_TRUE(later.has_value());
  // Each comes back by itself, however long it took to refuse them.
  EXPECT_GT(*later + (absl::Now() - before), *delay + absl::Milliseconds(900));
  EXPECT_EQ(engine::ReasonOf(refused), engine::RejectReason::kOverload);
  std::promise<void> last;
  pool.Run([&] { last.set_value(); });  // not a client's
  let_go.Notify();
  testing::Await("the last task", last);
  EXPECT_EQ(ran, WorkerPool::kMostWaiting + 1);
  EXPECT_TRUE(pool.TryRun([] {}).ok());
}

}  // namespace
}  // namespace lossd::engine::worker_pool_test
