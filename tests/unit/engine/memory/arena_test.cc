// Pieces of an arena never overlap, and everything that was given back can be taken again.
#include "server/engine/memory/arena.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>

namespace lossd::engine::arena_test {
namespace {

constexpr int64_t kUnit = Arena::kUnit;

TEST(Arena, GivesNothingItDoesNotHave) {
  Arena none(kUnit - 1);
  EXPECT_EQ(none.Take(1), std::nullopt);
  Arena arena(3 * kUnit + 5);
  EXPECT_EQ(arena.Take(3 * kUnit + 1), std::nullopt);
  EXPECT_EQ(arena.Take(3 * kUnit), 0);
  EXPECT_EQ(arena.Take(1), std::nullopt);
  EXPECT_EQ(arena.free_bytes(), 0);
}

TEST(Arena, JoinsWhatIsGivenBackInAnyOrder) {
  for (const auto& order : {std::array{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}}) {
    Arena arena(3 * kUnit);
    for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(arena.Take(kUnit), i * kUnit);
    for (const int i : order) arena.Give(i * kUnit, kUnit);
    EXPECT_EQ(arena.Take(3 * kUnit), 0);
  }
}

TEST(Arena, KnowsWhatIsUsedAndTheMostThatEverWas) {
  Arena arena(4 * kUnit + 5);
  EXPECT_EQ(arena.usage().capacity, 4 * kUnit) << "whole units";
  EXPECT_EQ(arena.usage().used, 0);
  const int64_t first = *arena.Take(1);
  const int64_t second = *arena.Take(kUnit + 1);
  EXPECT_EQ(arena.usage().used, 3 * kUnit);
  EXPECT_EQ(arena.Take(2 * kUnit), std::nullopt);
  arena.Give(first, 1);
  EXPECT_EQ(arena.usage().used, 2 * kUnit);
  EXPECT_EQ(arena.usage().peak, 3 * kUnit);
  arena.Give(second, kUnit + 1);
  EXPECT_EQ(arena.usage().used, 0);
  EXPECT_EQ(arena.usage().peak, 3 * kUnit);
}

TEST(Arena, PiecesNeverOverlapAndNothingIsLost) {
  constexpr int64_t kBytes = 200 * kUnit;
  Arena arena(kBytes);
  std::map<int64_t, int64_t> taken;
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0) {
      const int64_t bytes = 1 + static_cast<int64_t>(random() % (20 * kUnit));
      const std::optional<int64_t> offset = arena.Take(bytes);
      if (!offset.has_value()) continue;
      ASSERT_EQ(*offset % kUnit, 0);
      ASSERT_LE(*offset, kBytes - bytes);
      const auto next = taken.lower_bound(*offset);
      if (next != taken.end()) {
        ASSERT_LE(*offset + bytes, next->first);
      }
      if (next != taken.begin()) {
        const auto before = std::prev(next);
        ASSERT_LE(before->first + before->second, *offset);
      }
      taken.emplace(*offset, bytes);
    } else if (!taken.empty()) {
      const auto it = std::next(taken.begin(), static_cast<int64_t>(random() % taken.size()));
      arena.Give(it->first, it->second);
      taken.erase(it);
    }
  }
  for (const auto& [offset, bytes] : taken) arena.Give(offset, bytes);
  EXPECT_EQ(arena.free_bytes(), kBytes);
  EXPECT_EQ(arena.Take(kBytes), 0) << "in one piece";
}

}  // namespace
}  // namespace lossd::engine::arena_test
