#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "server/engine/memory/process_memory.h"

namespace lossd::engine::freed_memory_test {
namespace {

constexpr int64_t kKept = int64_t{32} << 20;
constexpr size_t kBlock = 4 << 10;
constexpr size_t kBlocks = 50'000;  // 200 MiB

using Block = std::unique_ptr<void, decltype(&free)>;

int64_t Resident() { return ReadProcessMemory().resident_bytes; }

// Leaves every hundredth: what malloc gives back by itself has no block in use behind it.
void FreeMost(std::vector<Block>& blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (i % 100 != 0) blocks[i].reset();
  }
}

std::vector<Block> Allocate() {
  std::vector<Block> blocks;
  for (size_t i = 0; i < kBlocks; ++i) {
    blocks.emplace_back(malloc(kBlock), free);
    *static_cast<volatile char*>(blocks.back().get()) = 1;
  }
  return blocks;
}

TEST(FreedMemoryTest, WhatIsNotUsedForAWhileGoesBackToTheSystem) {
  RaiseMallocThresholds();
  FreedMemory freed(kKept);
  const int64_t before = Resident();
  for (int burst = 0; burst < 2; ++burst) {
    std::vector<Block> blocks = Allocate();
    FreeMost(blocks);
    const int64_t held = Resident() - before;
    ASSERT_GT(held, int64_t{150} << 20) << "there is nothing to return";
    for (size_t i = 0; i < FreedMemory::kLooks; ++i) freed.Look();
    EXPECT_LT(Resident() - before, held / 4) << "after burst " << burst;
  }
}

TEST(FreedMemoryTest, WhatIsUsedAgainAndAgainStays) {
  RaiseMallocThresholds();
  FreedMemory freed(kKept);
  const int64_t before = Resident();
  for (int i = 0; i < 5; ++i) {
    std::vector<Block> blocks = Allocate();
    freed.Look();
    FreeMost(blocks);
    freed.Look();
    EXPECT_GT(Resident() - before, int64_t{150} << 20);
  }
}

}  // namespace
}  // namespace lossd::engine::freed_memory_test
