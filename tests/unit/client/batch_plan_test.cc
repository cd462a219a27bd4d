// How batches are cut into chunks.
#include "client/src/batch/batch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

namespace lossd::internal::batch_plan_test {
namespace {

constexpr int64_t kHidden = 16;

constexpr int64_t kRow = kHidden * 2;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kMiBTokens = kMiB / kRow;

struct Cutter {
  std::vector<ChunkRange> Cut(int64_t tokens, int64_t chunk_bytes = 0) const {
    return Plan(tokens, chunk_bytes).chunks;
  }

  // Whole and in order.
  BatchPlan Plan(int64_t tokens, int64_t chunk_bytes = 0) const {
    const auto plan = Try(tokens, chunk_bytes);
    EXPECT_TRUE(plan.ok()) << plan.status();
    int64_t next = 0;
    for (const ChunkRange& range : plan->chunks) {
      EXPECT_EQ(range.first, next);
      EXPECT_GE(range.tokens, 1);
      next += range.tokens;
    }
    EXPECT_EQ(next, tokens);
    return *plan;
  }

  absl::StatusOr<BatchPlan> Try(int64_t tokens, int64_t chunk_bytes) const {
    const std::vector<int64_t> labels(static_cast<size_t>(tokens));
    Batch batch;
    batch.labels = labels;
    batch.hidden_type = DataType::kBFloat16;
    batch.distillation = distillation;
    std::vector<int64_t> offsets;
    for (int64_t i = 0; kept > 0 && i <= tokens; ++i) {
      offsets.push_back(i * kept + (longest > 0 && i > tokens / 2 ? longest - kept : 0));
    }
    (of_targets ? batch.target_lists.lists : batch.kept_tokens).offsets = offsets;
    return PlanBatch({.name = "h", .vocab_size = 4, .hidden_size = hidden}, batch, outputs, places,
                     SentTokens::All(tokens), chunk_bytes, limits, lanes);
  }

  int64_t hidden = kHidden;
  v1::SessionLimits limits;
  // A dX as wide as hidden states is wanted. Plans look at no element of it.
  static inline std::byte any_dx{};
  BatchOutputs outputs = {.dx_type = DataType::kBFloat16, .dx = &any_dx};
  BatchPlaces places;
  std::optional<Distillation> distillation;
  int32_t lanes = 1;
  int64_t kept = 0;     // tokens of each list; 0: no lists
  int64_t longest = 0;  // of the list in the middle; 0: as many as the others have
  bool of_targets = false;
};

std::vector<int64_t> Sizes(const std::vector<ChunkRange>& chunks) {
  std::vector<int64_t> sizes;
  for (const ChunkRange& chunk : chunks) sizes.push_back(chunk.tokens);
  return sizes;
}

TEST(PlanBatchTest, ListsOfTokensFitTheChunksThatTheyAreCutWith) {
  Cutter cutter;
  cutter.kept = 300;
  for (const ChunkRange& chunk : cutter.Cut(20000)) {
    EXPECT_LE(chunk.tokens * 300, int64_t{1} << 20);
    EXPECT_GE(chunk.payload_bytes, chunk.tokens * (kRow + 8 + 8 + 4 * 300));
  }
  EXPECT_GE(cutter.Cut(20000).size(), 6U);
  cutter.limits.set_max_chunk_bytes(kMiB);
  for (const ChunkRange& chunk : cutter.Cut(20000)) EXPECT_LE(chunk.tokens * 300 * 4, kMiB / 2);
  cutter.kept = 0;
  cutter.limits.clear_max_chunk_bytes();
  EXPECT_EQ(cutter.Cut(20000).size(), Cutter().Cut(20000).size());
}

TEST(PlanBatchTest, ALongListAmongShortOnesMakesNoSmallChunksOfTheOthers) {
  Cutter cutter;
  cutter.kept = 64;
  const size_t without = cutter.Cut(20000).size();
  cutter.longest = 1'000'000;
  const std::vector<ChunkRange> chunks = cutter.Cut(20000);
  EXPECT_LE(chunks.size(), without + 3);
  int64_t payload_bytes = 0;
  for (const ChunkRange& chunk : chunks) {
    const bool has_longest = chunk.first <= 10000 && 10000 < chunk.first + chunk.tokens;
    const int64_t listed = chunk.tokens * 64 + (has_longest ? cutter.longest - 64 : 0);
    EXPECT_LE(listed, kMiB);
    EXPECT_EQ(chunk.payload_bytes, chunk.tokens * (kRow + kRow + 8 + 4 + 8) + 8 + 4 * listed);
    payload_bytes += chunk.payload_bytes;
  }
  EXPECT_GT(payload_bytes, 4 * cutter.longest);
  // The longest has a chunk to itself where half of the credit is less than it.
  cutter.limits.set_byte_credit(4 * kMiB);
  for (const ChunkRange& chunk : cutter.Cut(20000)) {
    EXPECT_TRUE(chunk.tokens == 1 || 2 * chunk.payload_bytes <= 4 * kMiB);
  }
  cutter.longest = kMiB + 1;
  EXPECT_EQ(cutter.Try(20000, 0).status().message(),
            "kept_tokens has a list of 1048577 tokens; the server takes lists of at most 1048576");
}

TEST(PlanBatchTest, ListsOfTokensThatAreNotSentDoNotCount) {
  // A prompt without weight, whose lists are short, before an answer whose lists are long.
  constexpr int64_t kTokens = 2000;
  const std::vector<int64_t> labels(kTokens);
  std::vector<float> weights(kTokens);
  std::vector<int64_t> offsets = {0};
  for (int64_t i = 0; i < kTokens; ++i) {
    const bool is_answer = i >= kTokens / 2;
    weights[static_cast<size_t>(i)] = is_answer ? 1.0f : 0.0f;
    offsets.push_back(offsets.back() + (is_answer ? 3000 : 64));
  }
  const HeadConfig head{.name = "h", .vocab_size = 4000, .hidden_size = kHidden};
  Batch batch;
  batch.labels = labels;
  batch.token_weights = weights;
  batch.kept_tokens.offsets = offsets;
  const BatchOutputs outputs;
  const SentTokens sent = SentTokens::Of(NeededTokens(head, batch, outputs));
  ASSERT_EQ(sent.count(), kTokens / 2);
  const auto plan = PlanBatch(head, batch, outputs, {}, sent, 0, {}, 1);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const ChunkRange& chunk : plan->chunks) {
    EXPECT_LE(chunk.tokens * 3000, kMiB);
    EXPECT_GT(chunk.payload_bytes, chunk.tokens * 3000 * 4);
  }
}

TEST(PlanBatchTest, ListsOfRowsThatARegionHasTogetherAreOfOneChunk) {
  Cutter cutter;
  cutter.hidden = 7;
  cutter.places.hidden_states = RegionPlace{};
  cutter.kept = 1000;
  cutter.longest = 1'040'000;
  for (const ChunkRange& chunk : cutter.Cut(1000)) EXPECT_EQ(chunk.first % 8, 0);
  cutter.longest = 1'045'000;
  EXPECT_EQ(
      cutter.Try(1000, 0).status().message(),
      "kept_tokens has lists of 1052000 tokens for 8 rows, which in a region are one chunk at least; the "
      "server takes lists of at most 1048576: use no region");
}

TEST(PlanBatchTest, ListsOfSoftTargetsCountWithTheirProbabilities) {
  Cutter cutter;
  cutter.kept = 300;
  const ChunkRange of_kept = cutter.Cut(1)[0];
  cutter.of_targets = true;
  EXPECT_EQ(cutter.Cut(1)[0].payload_bytes, of_kept.payload_bytes + 4 * 300);
  for (const ChunkRange& chunk : cutter.Cut(20000)) EXPECT_LE(chunk.tokens * 300, int64_t{1} << 20);
  cutter.limits.set_max_chunk_bytes(kMiB);
  for (const ChunkRange& chunk : cutter.Cut(20000)) EXPECT_LE(chunk.tokens * 300 * 8, kMiB / 2);
  cutter.kept = kMiB;
  EXPECT_EQ(cutter.Try(1, 0).status().message(),
            "target_lists.lists has a list of 1048576 tokens; the server takes lists of at most 65536");
}

TEST(PlanBatchTest, SmallChunksAreAsFewAsCanBeOfNearlyEqualSize) {
  const Cutter cutter;
  EXPECT_EQ(cutter.Cut(1).size(), 1U);
  EXPECT_EQ(cutter.Cut(10, 10 * kRow).size(), 1U);
  EXPECT_EQ(Sizes(cutter.Cut(11, 10 * kRow)), (std::vector<int64_t>{6, 5}));  // not ten and one
  EXPECT_EQ(cutter.Cut(kMiBTokens * 60, kMiB - 1).size(), 61U);
}

TEST(PlanBatchTest, ATeachersHiddenStatesCountWithTheHeadsOwn) {
  Cutter cutter;
  cutter.distillation = {.teacher = "t", .hidden_size = 3 * kHidden, .hidden_type = DataType::kBFloat16};
  EXPECT_EQ(Sizes(cutter.Cut(10, 8 * kRow)), (std::vector<int64_t>{2, 2, 2, 2, 2}));
  const ChunkRange with = cutter.Cut(1)[0];
  cutter.distillation.reset();
  EXPECT_EQ(with.payload_bytes, cutter.Cut(1)[0].payload_bytes + 3 * kRow);
}

TEST(PlanBatchTest, BatchThatGainsNothingByPipeliningStaysWhole) {
  const Cutter cutter;
  EXPECT_EQ(cutter.Cut(kMiBTokens).size(), 1U);
  EXPECT_EQ(cutter.Cut(2 * kMiBTokens).size(), 1U);
}

TEST(PlanBatchTest, ChunksAreSmallAtBothEndsAndOf4MiBBetween) {
  const Cutter cutter;
  const int64_t unit = kMiBTokens;
  EXPECT_EQ(Sizes(cutter.Cut(4 * unit)), (std::vector<int64_t>{unit, 2 * unit, unit}));
  EXPECT_EQ(Sizes(cutter.Cut(8 * unit)), (std::vector<int64_t>{unit, 3 * unit, 3 * unit, unit}));
  EXPECT_EQ(Sizes(cutter.Cut(10 * unit)), (std::vector<int64_t>{unit, 2 * unit, 4 * unit, 2 * unit, unit}));
  EXPECT_EQ(Sizes(cutter.Cut(18 * unit)),
            (std::vector<int64_t>{unit, 2 * unit, 4 * unit, 4 * unit, 4 * unit, 2 * unit, unit}));
  for (const int64_t tokens :
       {2 * unit + 1, 3 * unit - 1, 9 * unit + 7, 10 * unit - 1, 10 * unit + 1, 99 * unit}) {
    const std::vector<int64_t> sizes = Sizes(cutter.Cut(tokens));
    EXPECT_GE(sizes.size(), 3U) << tokens;
    for (const int64_t size : sizes) {
      EXPECT_LE(size, 4 * unit) << tokens;
      EXPECT_GE(size, unit / 2) << tokens;
    }
    EXPECT_LE(sizes.front(), unit) << tokens;
    EXPECT_LE(sizes.back(), unit) << tokens;
    // No more than the ends ask for.
    EXPECT_LE(static_cast<int64_t>(sizes.size()), tokens / (4 * unit) + 4) << tokens;
  }
}

TEST(PlanBatchTest, BatchTakesALaneForEveryLargestChunkItFills) {
  Cutter cutter;
  cutter.lanes = 4;
  EXPECT_EQ(cutter.Plan(1).lanes, 1);
  EXPECT_EQ(cutter.Plan(8 * kMiBTokens - 1).lanes, 1);
  EXPECT_EQ(cutter.Plan(8 * kMiBTokens).lanes, 2);
  EXPECT_EQ(cutter.Plan(15 * kMiBTokens).lanes, 3);
  EXPECT_EQ(cutter.Plan(1000 * kMiBTokens).lanes, 4);
  EXPECT_EQ(cutter.Plan(30, 10 * kRow).lanes, 3);
  cutter.lanes = 1;
  EXPECT_EQ(cutter.Plan(1000 * kMiBTokens).lanes, 1);
}

// Rows of seven elements of two bytes: every eighth begins at a multiple of 16.
TEST(PlanBatchTest, ChunksInRegionsBeginWhereOffsetsAreAligned) {
  Cutter cutter;
  cutter.hidden = 7;
  cutter.places.hidden_states = RegionPlace{};
  for (const int64_t tokens : {1, 2, 7, 8, 9, 23, 64, 100}) {
    for (const int64_t most : {8, 9, 24}) {
      for (const ChunkRange& range : cutter.Cut(tokens, most * 7 * 2)) {
        EXPECT_EQ(range.first % 8, 0) << tokens << " " << most;
        EXPECT_LE(range.tokens, most);
      }
    }
  }
}

TEST(PlanBatchTest, WhatIsInARegionCostsNoCredit) {
  Cutter cutter;
  int64_t dx = 0;
  cutter.outputs = {.dx_type = DataType::kFloat32, .dx = &dx};
  const int64_t plain = cutter.Cut(1)[0].payload_bytes;
  cutter.places.hidden_states = RegionPlace{};
  EXPECT_EQ(cutter.Cut(1)[0].payload_bytes, plain - kHidden * 2);
  cutter.places.dx = RegionPlace{};
  EXPECT_EQ(cutter.Cut(1)[0].payload_bytes, 8 + 4);
}

TEST(PlanBatchTest, LimitsThatLeaveNoAlignedChunkAreSaid) {
  Cutter cutter;
  cutter.hidden = 7;
  cutter.places.hidden_states = RegionPlace{};
  cutter.limits.set_max_chunk_tokens(4);
  EXPECT_TRUE(absl::IsInvalidArgument(cutter.Try(5, 0).status()));
  EXPECT_TRUE(cutter.Try(4, 0).ok());
}

TEST(PlanBatchTest, ABatchThatIsAllInRegionsGoesInChunksAsLargeAsCanBeOnOneLane) {
  Cutter cutter;
  cutter.lanes = 4;
  int64_t dx = 0;
  cutter.outputs = {.dx_type = DataType::kBFloat16, .dx = &dx};
  cutter.places.hidden_states = RegionPlace{};
  EXPECT_EQ(cutter.Plan(32 * kMiBTokens).lanes, 4) << "dX is not";
  cutter.places.dx = RegionPlace{};
  cutter.limits.set_max_chunk_bytes(16 * kMiB);
  EXPECT_EQ(cutter.Plan(32 * kMiBTokens).lanes, 1);
  EXPECT_EQ(Sizes(cutter.Cut(32 * kMiBTokens)), (std::vector<int64_t>{16 * kMiBTokens, 16 * kMiBTokens}));
}

TEST(PlanBatchTest, NoChunkIsEmptyHoweverFewTokensThereAre) {
  // Rows so large that chunks of a few of them are worth cutting smaller at both ends.
  Cutter cutter;
  cutter.hidden = kMiB / 8;
  for (int64_t most = 4; most <= 40; ++most) {
    for (int64_t tokens = 1; tokens <= 4 * most; ++tokens) {
      // Cut expects them all to have tokens, and to be one after the other.
      for (const ChunkRange& range : cutter.Cut(tokens, most * cutter.hidden * 2)) {
        ASSERT_LE(range.tokens, most) << tokens;
      }
    }
  }
}

TEST(PlanBatchTest, HonoursTheServersLimits) {
  Cutter cutter;
  cutter.limits.set_max_chunk_bytes(5 * kHidden * 2 + 1);
  for (const ChunkRange& range : cutter.Cut(23)) EXPECT_LE(range.tokens, 5);
  cutter.limits.set_max_chunk_tokens(3);
  for (const ChunkRange& range : cutter.Cut(23)) EXPECT_LE(range.tokens, 3);
  cutter.limits.set_max_chunk_bytes(2 * kMiB);
  cutter.limits.set_max_chunk_tokens(0);
  for (const ChunkRange& range : cutter.Cut(50 * kMiBTokens)) EXPECT_LE(range.tokens, 2 * kMiBTokens);
}

TEST(PlanBatchTest, TakesTheChunksTheServerPrefersUnlessOthersAreAskedFor) {
  Cutter cutter;
  cutter.limits.set_preferred_chunk_bytes(2 * kMiB);
  // The size of the largest chunk, rounded up: as few as can be share the rest equally.
  const auto mebibytes = [&cutter](int64_t chunk_bytes) {
    const int64_t largest = std::ranges::max(Sizes(cutter.Cut(64 * kMiBTokens, chunk_bytes)));
    return (largest + kMiBTokens - 1) / kMiBTokens;
  };
  EXPECT_EQ(mebibytes(0), 2);
  EXPECT_EQ(mebibytes(8 * kMiB), 8);
  cutter.limits.set_max_chunk_bytes(kMiB);
  EXPECT_EQ(mebibytes(0), 1);
  cutter.limits.clear_preferred_chunk_bytes();
  cutter.limits.clear_max_chunk_bytes();
  EXPECT_EQ(mebibytes(0), 4);
}

TEST(PlanBatchTest, CountsPayloadAsTheCreditDoes) {
  Cutter cutter;
  EXPECT_EQ(cutter.Cut(2)[0].payload_bytes, 2 * (8 + kHidden * 2 + 4 + kHidden * 2));
  cutter.outputs.dx_type = DataType::kFloat32;
  EXPECT_EQ(cutter.Cut(2)[0].payload_bytes, 2 * (8 + kHidden * 2 + 4 + kHidden * 4));
  cutter.outputs.dx = nullptr;
  EXPECT_EQ(cutter.Cut(2)[0].payload_bytes, 2 * (8 + kHidden * 2 + 4));
}

TEST(PlanBatchTest, TwoChunksFitTheCredit) {
  Cutter cutter;
  cutter.limits.set_byte_credit(1000);
  for (const ChunkRange& range : cutter.Cut(100)) EXPECT_LE(2 * range.payload_bytes, 1000);
  cutter.limits.set_byte_credit(8 * kMiB);
  for (const ChunkRange& range : cutter.Cut(50 * kMiBTokens)) EXPECT_LE(2 * range.payload_bytes, 8 * kMiB);
  cutter.limits.set_byte_credit(1);
  EXPECT_EQ(cutter.Cut(3).size(), 3U);
}

TEST(PlanBatchTest, TokenAboveTheLimitIsRefusedWithBothSizes) {
  Cutter cutter;
  cutter.limits.set_max_chunk_bytes(kHidden * 2 - 1);
  const auto plan = cutter.Try(1, 0);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(plan.status().message(),
            "one token of hidden_states has 32 bytes; the server takes chunks of at most 31");
}

}  // namespace
}  // namespace lossd::internal::batch_plan_test
