#include "server/engine/memory/process_memory.h"

#include <cstdint>

#include "gtest/gtest.h"

namespace lossd::engine::process_memory_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

TEST(DefaultMemory, HeadsAndStagingFitIntoWhatIsAvailable) {
  for (const int64_t available : {256 * kMiB, kGiB, 4 * kGiB, 22 * kGiB, 100 * kGiB, 2000 * kGiB}) {
    const int64_t staging = DefaultStagingBytes(available);
    const int64_t heads = DefaultHeadBytes(available, staging);
    EXPECT_GT(staging, 0);
    EXPECT_GT(heads, 0);
    EXPECT_LT(staging + heads, available) << available;
  }
}

TEST(DefaultMemory, TheProcessKeepsAGibibyteForItselfWhereThereIsOne) {
  EXPECT_EQ(DefaultStagingBytes(22 * kGiB), 5 * kGiB + kGiB / 2);
  EXPECT_LE(5 * kGiB + kGiB / 2 + DefaultHeadBytes(22 * kGiB, 5 * kGiB + kGiB / 2), 21 * kGiB);
  EXPECT_EQ(DefaultHeadBytes(8 * kGiB, 2 * kGiB), 5 * kGiB);
}

TEST(DefaultMemory, StagingHasBounds) {
  EXPECT_EQ(DefaultStagingBytes(2 * kGiB), kGiB);
  EXPECT_EQ(DefaultStagingBytes(6 * kGiB), 2 * kGiB);
  EXPECT_EQ(DefaultStagingBytes(1000 * kGiB), 64 * kGiB);
}

TEST(DefaultMemory, StagingThatTakesEverythingLeavesNothing) {
  EXPECT_EQ(DefaultHeadBytes(4 * kGiB, 5 * kGiB), 0);
}

}  // namespace
}  // namespace lossd::engine::process_memory_test
