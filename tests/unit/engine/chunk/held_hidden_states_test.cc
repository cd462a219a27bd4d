// Hidden states that a session holds: what comes back of them, and what gives way.
#include "server/engine/chunk/held_hidden_states.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/memory/payload.h"

namespace lossd::engine::held_hidden_states_test {
namespace {

constexpr int64_t kHidden = 2;
constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));
constexpr int64_t kIgnored = -100;
constexpr uint64_t kBatch = 7;

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Tokens [first, first + labels.size()) of a batch, the hidden states of each of which are `value` and
// `value` + 0.5, with one more for each token.
Chunk ChunkOf(int64_t first, const std::vector<int64_t>& labels, float value, uint64_t number = kBatch) {
  Chunk chunk;
  chunk.tokens = static_cast<int64_t>(labels.size());
  chunk.labels = Bytes(labels);
  chunk.hold = {.number = number, .first = first};
  std::vector<float> hidden;
  for (size_t i = 0; i < labels.size(); ++i) {
    hidden.push_back(value + static_cast<float>(i));
    hidden.push_back(hidden.back() + 0.5F);
  }
  chunk.hidden_states = Payload::Of(Bytes(hidden));
  return chunk;
}

// The same without hidden states.
Chunk Bare(int64_t first, const std::vector<int64_t>& labels, uint64_t number = kBatch) {
  Chunk chunk = ChunkOf(first, labels, 0, number);
  chunk.hidden_states = {};
  return chunk;
}

std::vector<float> Floats(const Payload& payload) {
  std::vector<float> values(static_cast<size_t>(payload.size()) / sizeof(float));
  Gather(payload.parts(), reinterpret_cast<std::byte*>(values.data()));
  return values;
}

bool Has(HeldHiddenStates& held, int64_t first, int64_t tokens, uint64_t number = kBatch) {
  Chunk chunk = Bare(first, std::vector<int64_t>(static_cast<size_t>(tokens), 1), number);
  return held.Recall(kHidden, &chunk).ok();
}

TEST(HeldHiddenStates, ComeBackHoweverTheyAreCut) {
  HeldHiddenStates held(1 << 20);
  ASSERT_TRUE(held.Keep(ChunkOf(0, {1, 2, 3}, 10)));
  ASSERT_TRUE(held.Keep(ChunkOf(3, {4, 5}, 20)));
  for (int64_t first = 0; first < 5; ++first) {
    for (int64_t end = first + 1; end <= 5; ++end) {
      Chunk chunk = Bare(first, std::vector<int64_t>(static_cast<size_t>(end - first), 1));
      ASSERT_TRUE(held.Recall(kHidden, &chunk).ok());
      const std::vector<float> all = {10, 10.5, 11, 11.5, 12, 12.5, 20, 20.5, 21, 21.5};
      EXPECT_EQ(Floats(chunk.hidden_states),
                std::vector<float>(all.begin() + first * kHidden, all.begin() + end * kHidden));
    }
  }
}

TEST(HeldHiddenStates, IgnoredTokensTakeNoPlaceAndComeBackAsZeros) {
  HeldHiddenStates held(3 * kRowBytes);
  ASSERT_TRUE(held.Keep(ChunkOf(0, {kIgnored, 1, kIgnored, 2, 3}, 10)));
  EXPECT_EQ(held.used(), 3 * kRowBytes);
  Chunk chunk = Bare(1, {2, kIgnored, kIgnored, 3});
  ASSERT_TRUE(held.Recall(kHidden, &chunk).ok());
  EXPECT_EQ(Floats(chunk.hidden_states), (std::vector<float>{13, 13.5, 0, 0, 0, 0, 14, 14.5}));
}

TEST(HeldHiddenStates, WhatIsNotHeldIsNamed) {
  HeldHiddenStates held(1 << 20);
  ASSERT_TRUE(held.Keep(ChunkOf(2, {1, 2}, 10)));
  for (const auto& [first, tokens, number] : {std::tuple<int64_t, int64_t, uint64_t>{1, 2, kBatch},
                                              {3, 2, kBatch},
                                              {2, 2, kBatch + 1},
                                              {-1, 1, kBatch},
                                              {INT64_MAX, 2, kBatch}}) {
    Chunk chunk = Bare(first, std::vector<int64_t>(static_cast<size_t>(tokens), 1), number);
    const absl::Status missing = held.Recall(kHidden, &chunk);
    EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound) << first;
    EXPECT_EQ(chunk.hidden_states.size(), 0);
  }
  Chunk narrow = Bare(2, {1, 2});
  narrow.hidden_type = kernels::DataType::kBFloat16;
  EXPECT_EQ(held.Recall(kHidden, &narrow).message(),
            "hidden states of token 2 of hold 7 are not held as bf16");
}

TEST(HeldHiddenStates, ARepeatTakesThePlaceOfTheFirst) {
  HeldHiddenStates held(4 * kRowBytes);
  ASSERT_TRUE(held.Keep(ChunkOf(0, {1, 2}, 10)));
  ASSERT_TRUE(held.Keep(ChunkOf(2, {1, 2}, 20)));
  ASSERT_TRUE(held.Keep(ChunkOf(0, {1, 2}, 30)));
  Chunk chunk = Bare(0, {1, 2, 1, 2});
  ASSERT_TRUE(held.Recall(kHidden, &chunk).ok());
  EXPECT_EQ(Floats(chunk.hidden_states), (std::vector<float>{30, 30.5, 31, 31.5, 20, 20.5, 21, 21.5}));
  ASSERT_TRUE(held.Keep(ChunkOf(1, {1, 2}, 40))) << "which lies across both";
  EXPECT_EQ(held.used(), 2 * kRowBytes);
  EXPECT_TRUE(Has(held, 1, 2));
  EXPECT_FALSE(Has(held, 0, 1));
  EXPECT_FALSE(Has(held, 3, 1));
}

TEST(HeldHiddenStates, TheOldestBatchGivesWayAsAWhole) {
  HeldHiddenStates held(6 * kRowBytes);
  ASSERT_TRUE(held.Keep(ChunkOf(0, {1, 2}, 10, 1)));
  ASSERT_TRUE(held.Keep(ChunkOf(0, {1, 2}, 10, 2)));
  ASSERT_TRUE(held.Keep(ChunkOf(2, {1, 2}, 10, 1)));
  ASSERT_TRUE(held.Keep(ChunkOf(0, {1}, 10, 3)));
  EXPECT_FALSE(Has(held, 0, 2, 1));
  EXPECT_FALSE(Has(held, 2, 2, 1));
  EXPECT_TRUE(Has(held, 0, 2, 2));
  EXPECT_EQ(held.used(), 3 * kRowBytes);
}

TEST(HeldHiddenStates, ABatchNeverGivesWayToMoreOfItself) {
  HeldHiddenStates held(3 * kRowBytes);
  ASSERT_TRUE(held.Keep(ChunkOf(0, {1, 2}, 10)));
  EXPECT_FALSE(held.Keep(ChunkOf(2, {1, 2}, 10)));
  EXPECT_TRUE(Has(held, 0, 2));
  EXPECT_FALSE(held.Keep(ChunkOf(0, {1, 2, 3, 4}, 10, 2))) << "and to none that is too large anyway";
  EXPECT_TRUE(Has(held, 0, 2));
}

TEST(HeldHiddenStates, WhatAChunkStillUsesCountsUntilItIsDone) {
  HeldHiddenStates held(2 * kRowBytes);
  ASSERT_TRUE(held.Keep(ChunkOf(0, {1, 2}, 10, 1)));
  Chunk under_way = Bare(0, {1, 2}, 1);
  ASSERT_TRUE(held.Recall(kHidden, &under_way).ok());
  EXPECT_FALSE(held.Keep(ChunkOf(0, {1, 2}, 20, 2)));
  EXPECT_EQ(Floats(under_way.hidden_states), (std::vector<float>{10, 10.5, 11, 11.5}));
  under_way.hidden_states = {};
  EXPECT_EQ(held.used(), 0);
  EXPECT_TRUE(held.Keep(ChunkOf(0, {1, 2}, 20, 2)));
}

TEST(HeldHiddenStates, MemoryOutlivesTheSession) {
  Chunk under_way = Bare(0, {1});
  {
    HeldHiddenStates held(kRowBytes);
    ASSERT_TRUE(held.Keep(ChunkOf(0, {1}, 10)));
    ASSERT_TRUE(held.Recall(kHidden, &under_way).ok());
  }
  EXPECT_EQ(Floats(under_way.hidden_states), (std::vector<float>{10, 10.5}));
}

TEST(HeldHiddenStates, ManySmallPiecesGiveWayAlsoWhereThereIsRoom) {
  HeldHiddenStates held(1 << 20);
  for (uint64_t number = 1; number <= 4000; ++number) ASSERT_TRUE(held.Keep(ChunkOf(0, {1}, 10, number)));
  EXPECT_FALSE(Has(held, 0, 1, 1));
  EXPECT_TRUE(Has(held, 0, 1, 4000));
  EXPECT_LT(held.used(), 2000 * kRowBytes) << "1024, and one for each 4 KiB";
}

}  // namespace
}  // namespace lossd::engine::held_hidden_states_test
