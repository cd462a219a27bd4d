#include "server/engine/regions/region_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/unit/engine/fake_device.h"

namespace lossd::engine::region_table_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;
constexpr int64_t kClient = 17;

class RegionTableTest : public ::testing::Test {
 protected:
  explicit RegionTableTest(RegionLimits limits = {.total_bytes = 8 * kPage, .client_bytes = 4 * kPage})
      : device_(MakeFakeDevice(&gate_)),
        budget_(std::make_shared<MemoryBudget>(16 * kPage)),
        table_(std::make_unique<RegionTable>(limits, device_.get(), budget_)) {}

  std::shared_ptr<const Region> Create(int64_t bytes) {
    auto region = table_->Create(RegionKind::kSystem, bytes);
    EXPECT_TRUE(region.ok()) << region.status();
    return *std::move(region);
  }
  std::shared_ptr<const Region> Attached(int64_t bytes, int64_t client = kClient) {
    auto region = Create(bytes);
    EXPECT_TRUE(table_->Attach(region->handle(), client).ok());
    return region;
  }
  absl::Status TryCreate(int64_t bytes) { return table_->Create(RegionKind::kSystem, bytes).status(); }
  int64_t bytes() const { return table_->usage(RegionKind::kSystem).bytes; }

  FakeGate gate_;
  std::unique_ptr<Device> device_;
  std::shared_ptr<MemoryBudget> budget_;
  std::unique_ptr<RegionTable> table_;
};

TEST_F(RegionTableTest, ADroppedRegionsMemoryStaysUntilItsLastUserIsDone) {
  auto region = Attached(kPage);
  std::shared_ptr<const Region> user = *table_->Find(region->handle(), "x");
  region.reset();
  ASSERT_TRUE(table_->Drop(user->handle()).ok());
  EXPECT_TRUE(absl::IsNotFound(table_->Find(user->handle(), "x").status()));
  std::memset(user->memory().data(), 1, static_cast<size_t>(user->size()));
  EXPECT_EQ(bytes(), kPage);
  EXPECT_EQ(budget_->reserved(), kPage);
  user.reset();
  EXPECT_EQ(bytes(), 0);
  EXPECT_EQ(budget_->reserved(), 0);
}

TEST_F(RegionTableTest, AUserMayOutliveTheTable) {
  const auto region = Attached(kPage);
  table_.reset();
  std::memset(region->memory().data(), 1, static_cast<size_t>(region->size()));
  EXPECT_EQ(budget_->reserved(), kPage) << "it is counted as long as it is there";
}

TEST_F(RegionTableTest, SizesAreWholePagesAndAreCountedAsSuch) {
  const auto region = Create(1);
  EXPECT_EQ(region->size(), kPage);
  EXPECT_EQ(bytes(), kPage);
  EXPECT_EQ(table_->reserved_bytes(), kPage);
}

TEST_F(RegionTableTest, LimitsHoldForAllAndForEachClient) {
  const auto first = Attached(3 * kPage);
  EXPECT_EQ(TryCreate(5 * kPage).code(),
            absl::StatusCode::kResourceExhausted);  // more than a client may have
  const auto second = Create(2 * kPage);
  const absl::Status refused = table_->Attach(second->handle(), kClient).status();
  EXPECT_THAT(refused.message(), HasSubstr("--region_client_bytes"));
  EXPECT_TRUE(table_->Attach(second->handle(), kClient + 1).ok());
  EXPECT_TRUE(TryCreate(3 * kPage).ok());  // and is dropped nowhere: five of eight pages were taken
  EXPECT_THAT(TryCreate(1).message(), HasSubstr("--region_bytes"));
}

// Else a client could have as much as all others by not attaching.
TEST_F(RegionTableTest, WhatIsNotAttachedYetIsOneClientsShare) {
  const auto waiting = Create(3 * kPage);
  const absl::Status refused = TryCreate(2 * kPage);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryDelayOf(refused).has_value());
  ASSERT_TRUE(table_->Attach(waiting->handle(), kClient).ok());
  EXPECT_TRUE(TryCreate(2 * kPage).ok());
}

TEST_F(RegionTableTest, AFailedCreationLeavesNothingBehind) {
  const auto blocker = budget_->Reserve("head", "a head", {{"weights", 16 * kPage}});
  ASSERT_TRUE(blocker.ok());
  EXPECT_EQ(TryCreate(kPage).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(table_->Create(RegionKind::kDevice, kPage).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(bytes(), 0);
  EXPECT_EQ(table_->usage(RegionKind::kDevice).regions, 0);
}

TEST_F(RegionTableTest, ADeviceWithoutMemoryOfItsOwnSaysSo) {
  const absl::Status refused = table_->Create(RegionKind::kDevice, kPage).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FieldOf(refused), "kind");
  EXPECT_EQ(budget_->reserved(), 0);
}

TEST_F(RegionTableTest, HandlesAreParsedOnlyWhole) {
  const RegionHandle handle = RegionHandle::Random();
  EXPECT_EQ(handle.bytes().size(), 16U);
  EXPECT_TRUE(*RegionHandle::Parse(handle.bytes(), "x") == handle);
  EXPECT_FALSE(RegionHandle::Random() == handle);
  for (const size_t size : {0, 1, 15, 17}) {
    EXPECT_FALSE(RegionHandle::Parse(std::string(size, 'x'), "x").ok()) << size;
  }
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(RegionHandle::Random().bytes());
  EXPECT_EQ(seen.size(), 1000U);
}

TEST_F(RegionTableTest, ThreadsThatCreateAttachAndDropLeaveNothingBehind) {
  std::vector<std::thread> threads;
  for (int64_t client = 0; client < 4; ++client) {
    threads.emplace_back([this, client] {
      for (int i = 0; i < 200; ++i) {
        auto region = table_->Create(RegionKind::kSystem, 1 + i % 5000);
        if (!region.ok()) continue;
        if (i % 3 != 0) (void)table_->Attach((*region)->handle(), client);
        (void)table_->Find((*region)->handle(), "x");
        EXPECT_TRUE(table_->Drop((*region)->handle()).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(bytes(), 0);
  EXPECT_EQ(budget_->reserved(), 0);
  EXPECT_TRUE(TryCreate(4 * kPage).ok());
}

}  // namespace
}  // namespace lossd::engine::region_table_test
