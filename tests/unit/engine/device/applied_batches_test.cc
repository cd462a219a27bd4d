// When a batch of a group is done.
#include "server/engine/device/sharded/applied_batches.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lossd::engine::applied_batches_test {
namespace {

class AppliedBatchesTest : public ::testing::Test {
 protected:
  AppliedBatches::OnDone Start(int number) {
    return batches_.Start([this, number](const absl::StatusOr<BatchReport>& report) {
      done_.push_back(absl::StrCat(number, report.ok() ? " ok" : " failed"));
    });
  }

  AppliedBatches batches_;
  std::vector<std::string> done_;
};

using Done = std::vector<std::string>;

TEST_F(AppliedBatchesTest, ABatchIsDoneWhenEveryRankHasAppliedIt) {
  const AppliedBatches::OnDone first = Start(1);
  const AppliedBatches::OnDone second = Start(2);
  first(BatchReport{});
  second(BatchReport{});
  batches_.Poll(0);
  EXPECT_EQ(done_, Done());
  batches_.Poll(1);
  EXPECT_EQ(done_, Done({"1 ok"}));
  batches_.Poll(2);
  EXPECT_EQ(done_, Done({"1 ok", "2 ok"}));
  EXPECT_EQ(batches_.under_way(), 0);
}

TEST_F(AppliedBatchesTest, TheLeadersOwnPartIsWaitedFor) {
  const AppliedBatches::OnDone first = Start(1);
  batches_.Poll(1);
  EXPECT_EQ(done_, Done());
  first(BatchReport{});
  batches_.Poll(1);
  EXPECT_EQ(done_, Done({"1 ok"}));
}

// The rank that has not applied the first one is lost, as the second one shows.
TEST_F(AppliedBatchesTest, NoBatchBeforeAFailureIsWaitedFor) {
  const AppliedBatches::OnDone first = Start(1);
  const AppliedBatches::OnDone second = Start(2);
  const AppliedBatches::OnDone third = Start(3);
  first(BatchReport{});
  second(BatchReport{});
  third(absl::UnavailableError("a rank is lost"));
  batches_.Poll(1);
  EXPECT_EQ(done_, Done({"1 ok", "2 failed", "3 failed"}));
}

}  // namespace
}  // namespace lossd::engine::applied_batches_test
