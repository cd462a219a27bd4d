// Hidden states that a session holds: what comes back of them, and what gives way.
#include "server/engine/chunk/held_hidden_states.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "server/engine/memory/payload.h"

namespace lossd::engine::held_hidden_states_test {
namespace {

constexpr int64_t kHidden = 16;  // as many bytes a row as count at least
constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));
constexpr int64_t kIgnored = -100;
constexpr uint64_t kBatch = 7;

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Tokens [first, first + labels.size()) of a batch, the hidden states of each of which are all `value`, and
// one more for each token.
Chunk ChunkOf(int64_t first, const std::vector<int64_t>& labels, float value, uint64_t number = kBatch) {
  Chunk chunk;
  chunk.tokens = static_cast<int64_t>(labels.size());
  chunk.labels = Bytes(labels);
  chunk.hold = {.number = number, .first = first};
  std::vector<float> hidden;
  for (size_t i = 0; i < labels.size(); ++i) {
    hidden.insert(hidden.end(), kHidden, value + static_cast<float>(i));
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

// The first value of each row.
std::vector<float> Firsts(const Payload& payload) {
  std::vector<float> values(static_cast<size_t>(payload.size()) / sizeof(float));
  Gather(payload.parts(), reinterpret_cast<std::byte*>(values.data()));
  std::vector<float> firsts;
  for (size_t i = 0; i < values.size(); i += kHidden) {
    EXPECT_EQ(values[i], values[i + kHidden - 1]) << "a row in one piece";
    firsts.push_back(values[i]);
  }
  return firsts;
}

bool Keep(HeldHiddenStates& held, const Chunk& chunk) {
  std::optional<HeldHiddenStates::Piece> piece = held.Copy(chunk);
  if (!piece.has_value()) return false;
  held.Add(*std::move(piece));
  return true;
}

// What comes back of them, or nothing.
std::vector<float> Take(HeldHiddenStates& held, int64_t first, const std::vector<int64_t>& labels,
                        uint64_t number = kBatch) {
  Chunk chunk = Bare(first, labels, number);
  if (!held.Take(kHidden, &chunk).ok()) return {};
  return Firsts(chunk.hidden_states);
}

using Rows = std::vector<float>;

TEST(HeldHiddenStates, ComeBackHoweverTheyAreCut) {
  const std::vector<int64_t> labels = {1, 2, 3, 4, 5};
  for (int64_t cut = 1; cut < 5; ++cut) {
    HeldHiddenStates held(1 << 20);
    ASSERT_TRUE(Keep(held, ChunkOf(0, {1, 2, 3}, 10)));
    ASSERT_TRUE(Keep(held, ChunkOf(3, {4, 5}, 13)));
    const auto middle = labels.begin() + cut;
    Rows rows = Take(held, cut, {middle, labels.end()});
    const Rows before = Take(held, 0, {labels.begin(), middle});
    rows.insert(rows.begin(), before.begin(), before.end());
    EXPECT_EQ(rows, (Rows{10, 11, 12, 13, 14})) << cut;
  }
}

TEST(HeldHiddenStates, WhatWasTakenGoes) {
  HeldHiddenStates held(1 << 20);
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1, 2, 3}, 10)));
  EXPECT_EQ(Take(held, 0, {1, 2}), (Rows{10, 11}));
  EXPECT_EQ(held.used(), 3 * kRowBytes) << "the rest of it stays";
  EXPECT_EQ(Take(held, 2, {3}), (Rows{12}));
  EXPECT_EQ(held.used(), 0);
  EXPECT_EQ(Take(held, 0, {1, 2, 3}), Rows());
}

TEST(HeldHiddenStates, IgnoredTokensTakeNoPlaceAndComeBackAsZeros) {
  HeldHiddenStates held(3 * kRowBytes);
  ASSERT_TRUE(Keep(held, ChunkOf(0, {kIgnored, 1, kIgnored, 2, 3}, 10)));
  EXPECT_EQ(held.used(), 3 * kRowBytes);
  EXPECT_EQ(Take(held, 1, {2, kIgnored, kIgnored, 3}), (Rows{13, 0, 0, 14}));
}

TEST(HeldHiddenStates, WhatIsNotHeldIsNamed) {
  HeldHiddenStates held(1 << 20);
  ASSERT_TRUE(Keep(held, ChunkOf(2, {1, 1}, 10)));
  for (const auto& [first, tokens, number] : {std::tuple<int64_t, size_t, uint64_t>{1, 2, kBatch},
                                              {3, 2, kBatch},
                                              {2, 2, kBatch + 1},
                                              {-1, 1, kBatch},
                                              {INT64_MAX, 2, kBatch}}) {
    Chunk chunk = Bare(first, std::vector<int64_t>(tokens, 1), number);
    EXPECT_EQ(held.Take(kHidden, &chunk).code(), absl::StatusCode::kNotFound) << first;
    EXPECT_EQ(chunk.hidden_states.size(), 0);
  }
  Chunk narrow = Bare(2, {1, 1});
  narrow.hidden_type = kernels::DataType::kBFloat16;
  EXPECT_EQ(held.Take(kHidden, &narrow).message(),
            "those of token 2 of hold 7 are not held as bfloat16 and with this label");
  EXPECT_EQ(Take(held, 2, {1, 1}), (Rows{10, 11})) << "nothing of it has gone";
}

TEST(HeldHiddenStates, OtherLabelsGetNoRows) {
  HeldHiddenStates held(1 << 20);
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1, 2, 3}, 10)));
  EXPECT_EQ(Take(held, 0, {1, 5, 3}), Rows());
  EXPECT_EQ(Take(held, 0, {kIgnored, 2, 3}), Rows()) << "whose rows would be those of 1 and 2";
}

TEST(HeldHiddenStates, ARepeatTakesThePlaceOfTheFirst) {
  HeldHiddenStates held(1 << 20);
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1, 2}, 10)));
  ASSERT_TRUE(Keep(held, ChunkOf(2, {1, 2}, 20)));
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1, 2}, 30)));
  EXPECT_EQ(held.used(), 4 * kRowBytes);
  ASSERT_TRUE(Keep(held, ChunkOf(1, {5, 6}, 40))) << "which lies across both";
  EXPECT_EQ(held.used(), 2 * kRowBytes);
  EXPECT_EQ(Take(held, 0, {1}), Rows());
  EXPECT_EQ(Take(held, 3, {2}), Rows());
  EXPECT_EQ(Take(held, 1, {5, 6}), (Rows{40, 41}));
}

TEST(HeldHiddenStates, TheOldestBatchGivesWayAsAWhole) {
  HeldHiddenStates held(6 * kRowBytes);
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1, 2}, 10, 1)));
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1, 2}, 10, 2)));
  ASSERT_TRUE(Keep(held, ChunkOf(2, {1, 2}, 10, 1)));
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1}, 10, 3)));
  EXPECT_EQ(held.used(), 3 * kRowBytes);
  EXPECT_EQ(Take(held, 0, {1, 2}, 1), Rows());
  EXPECT_EQ(Take(held, 2, {1, 2}, 1), Rows());
  EXPECT_EQ(Take(held, 0, {1, 2}, 2), (Rows{10, 11}));
}

TEST(HeldHiddenStates, ABatchNeverGivesWayToMoreOfItself) {
  HeldHiddenStates held(3 * kRowBytes);
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1, 2}, 10)));
  EXPECT_FALSE(Keep(held, ChunkOf(2, {1, 2}, 10)));
  EXPECT_FALSE(Keep(held, ChunkOf(0, {1, 2, 3, 4}, 10, 2))) << "nor to what is too large anyway";
  EXPECT_EQ(Take(held, 0, {1, 2}), (Rows{10, 11}));
}

TEST(HeldHiddenStates, NothingGoesForWhatFindsNoRoomInTheEnd) {
  HeldHiddenStates held(4 * kRowBytes);
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1, 2, 3}, 10, 1)));
  ASSERT_TRUE(Keep(held, ChunkOf(0, {1}, 20, 2)));
  Chunk under_way = Bare(0, {1}, 1);
  ASSERT_TRUE(held.Take(kHidden, &under_way).ok());
  EXPECT_FALSE(Keep(held, ChunkOf(0, {1, 2}, 30, 3))) << "the chunk has three rows until it is done";
  EXPECT_EQ(Take(held, 0, {1}, 2), (Rows{20}));
  EXPECT_EQ(Firsts(under_way.hidden_states), (Rows{10}));
  under_way.hidden_states = {};
  EXPECT_TRUE(Keep(held, ChunkOf(0, {1, 2}, 30, 3)));
}

TEST(HeldHiddenStates, MemoryOutlivesTheSession) {
  Chunk under_way = Bare(0, {1});
  {
    HeldHiddenStates held(kRowBytes);
    ASSERT_TRUE(Keep(held, ChunkOf(0, {1}, 10)));
    ASSERT_TRUE(held.Take(kHidden, &under_way).ok());
  }
  EXPECT_EQ(Firsts(under_way.hidden_states), (Rows{10}));
}

TEST(HeldHiddenStates, ManySmallPiecesGiveWayAlsoWhereThereIsRoom) {
  HeldHiddenStates held(1 << 20);
  for (uint64_t number = 1; number <= 4000; ++number) ASSERT_TRUE(Keep(held, ChunkOf(0, {1}, 10, number)));
  EXPECT_EQ(held.used(), 1040 * kRowBytes) << "1024, and one for each 64 KiB";
  EXPECT_EQ(Take(held, 0, {1}, 1), Rows());
  EXPECT_EQ(Take(held, 0, {1}, 4000), (Rows{10}));
}

// For ThreadSanitizer.
TEST(HeldHiddenStates, ManyThreadsHoldAndTake) {
  HeldHiddenStates held(64 * kRowBytes);
  std::atomic<int> taken = 0;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint64_t i = 0; i < 200; ++i) {
        const uint64_t number = 1 + i % 7;
        const auto first = static_cast<int64_t>(2 * thread);
        Keep(held, ChunkOf(first, {1, 2}, static_cast<float>(10 * thread), number));
        const Rows rows = Take(held, first, {1, 2}, number);
        if (rows.empty()) continue;
        EXPECT_EQ(rows.front(), static_cast<float>(10 * thread));
        ++taken;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(taken, 0);
}

}  // namespace
}  // namespace lossd::engine::held_hidden_states_test
