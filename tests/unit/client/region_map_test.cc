#include "client/src/regions/region_map.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>

namespace lossd::internal::region_map_test {
namespace {

// A region of half of the memory, whose other half is the caller's own.
class RegionMapTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBytes = 8;

  RegionMapTest() {
    map_.Add(memory_.data(), {.bytes = kBytes, .handle = "r", .alive = [this] { return alive_; }});
  }
  auto Find(int64_t offset, int64_t bytes) const { return map_.Find(memory_.data() + offset, bytes, "dx"); }

  std::array<std::byte, 2 * kBytes> memory_{};
  bool alive_ = true;
  RegionMap map_;
};

TEST_F(RegionMapTest, MemoryInARegionIsTheRegions) {
  const auto found = Find(3, kBytes - 3);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_TRUE(found->has_value());
  EXPECT_EQ((*found)->handle, "r");
  EXPECT_EQ((*found)->offset, 3);
}

TEST_F(RegionMapTest, MemoryThatBeginsWhereARegionEndsIsTheCallers) {
  const auto found = Find(kBytes, kBytes);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_FALSE(found->has_value());
}

TEST_F(RegionMapTest, MemoryThatEndsBeyondARegionIsRefusedAndSoIsALostRegions) {
  EXPECT_EQ(Find(kBytes - 1, 2).status().code(), absl::StatusCode::kInvalidArgument);
  alive_ = false;
  EXPECT_EQ(Find(0, kBytes).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace lossd::internal::region_map_test
