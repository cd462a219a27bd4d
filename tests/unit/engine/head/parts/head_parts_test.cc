// The small parts of a head: Lifecycle, TeacherLease, LogitsQueue.
#include <gtest/gtest.h>

#include <utility>

#include "server/engine/head/parts/lifecycle.h"
#include "server/engine/head/parts/logits_queue.h"
#include "server/engine/head/parts/teacher_lease.h"

namespace lossd::engine::head_parts_test {
namespace {

TEST(Lifecycle, ADrainKeepsNewChunksOutAndLetsWindowsEnd) {
  Lifecycle life;
  life.Drain(absl::UnavailableError("draining"));
  EXPECT_EQ(life.admits().message(), "draining");
  EXPECT_TRUE(life.may_end_window().ok());
  EXPECT_TRUE(life.alive().ok());
}

TEST(Lifecycle, ARestoreLetsNoWindowEndUntilItIsOver) {
  Lifecycle life;
  life.BeginRestore(absl::UnavailableError("restoring"));
  EXPECT_EQ(life.may_end_window().message(), "restoring");
  EXPECT_TRUE(life.admits().ok());
  life.EndRestore();
  EXPECT_TRUE(life.may_end_window().ok());
}

TEST(Lifecycle, TheEndOutranksEverything) {
  Lifecycle life;
  life.Drain(absl::UnavailableError("draining"));
  life.BeginRestore(absl::UnavailableError("restoring"));
  life.End(absl::NotFoundError("deleted"));
  for (const absl::Status& status : {life.alive(), life.admits(), life.may_end_window()}) {
    EXPECT_EQ(status.message(), "deleted");
  }
}

TEST(TeacherLease, ReleasesAtOnceWithoutBatchesAndElseAfterTheLast) {
  int released = 0;
  TeacherLease idle;
  idle.WhenUnused([&released] { ++released; });
  EXPECT_EQ(released, 1);

  TeacherLease busy;
  busy.Begin();
  busy.Begin();
  busy.WhenUnused([&released] { ++released; });
  busy.End();
  EXPECT_EQ(released, 1);
  busy.End();
  EXPECT_EQ(released, 2);
}

TEST(TeacherLease, BatchesThatEndBeforeTheHeadIsDeletedReleaseNothing) {
  TeacherLease lease;
  lease.Begin();
  lease.End();
  bool released = false;
  lease.Begin();
  lease.WhenUnused([&released] { released = true; });
  EXPECT_FALSE(released);
  lease.End();
  EXPECT_TRUE(released);
}

LogitsCall Call(int64_t rows) {
  LogitsCall call;
  call.request.rows = rows;
  return call;
}

TEST(LogitsQueue, CallsGoInTheOrderOfTheirArrival) {
  LogitsQueue queue("h", 1000);
  for (const int64_t rows : {1, 2, 3}) {
    LogitsCall call = Call(rows);
    ASSERT_TRUE(queue.Add(call, 10).ok());
  }
  EXPECT_EQ(queue.TakeFront().request.rows, 1);
  EXPECT_EQ(queue.front().request.rows, 2);
}

TEST(LogitsQueue, RoomComesBackWithTheAnswerNotWithItsTurn) {
  LogitsQueue queue("h", 100);
  LogitsCall first = Call(1);
  ASSERT_TRUE(queue.Add(first, 80).ok());
  LogitsCall refused = Call(2);
  EXPECT_TRUE(absl::IsResourceExhausted(queue.Add(refused, 30)));
  {
    const LogitsCall answered = queue.TakeFront();
    EXPECT_TRUE(absl::IsResourceExhausted(queue.Add(refused, 30))) << "its client has not read it yet";
  }
  EXPECT_TRUE(queue.Add(refused, 30).ok());
  EXPECT_EQ(queue.front().request.rows, 2) << "a refused call is untouched";
}

TEST(LogitsQueue, SoManyCallsMayWaitHoweverSmall) {
  LogitsQueue queue("h", 1 << 20);
  for (int i = 0; i < 64; ++i) {
    LogitsCall call = Call(1);
    ASSERT_TRUE(queue.Add(call, 1).ok()) << i;
  }
  LogitsCall call = Call(1);
  EXPECT_TRUE(absl::IsResourceExhausted(queue.Add(call, 1)));
}

}  // namespace
}  // namespace lossd::engine::head_parts_test
