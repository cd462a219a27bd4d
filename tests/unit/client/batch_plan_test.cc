// How batches are cut into chunks.
#include "client/src/batch_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace lossd::internal {
namespace {

constexpr int64_t kHidden = 16;

struct Cutter {
  std::vector<ChunkRange> Cut(int64_t tokens, int64_t chunk_bytes = 0) const {
    const auto ranges = Try(tokens, chunk_bytes);
    EXPECT_TRUE(ranges.ok()) << ranges.status();
    int64_t next = 0;
    for (const ChunkRange& range : *ranges) {
      EXPECT_EQ(range.first, next);
      EXPECT_GE(range.tokens, 1);
      next += range.tokens;
    }
    EXPECT_EQ(next, tokens);
    return *ranges;
  }

  absl::StatusOr<std::vector<ChunkRange>> Try(int64_t tokens, int64_t chunk_bytes) const {
    const std::vector<int64_t> labels(static_cast<size_t>(tokens));
    Batch batch;
    batch.labels = labels;
    batch.hidden_type = DataType::kBFloat16;
    batch.mode = mode;
    return CutBatch({.name = "h", .vocab_size = 4, .hidden_size = hidden}, batch, outputs, places,
                    chunk_bytes, limits);
  }

  int64_t hidden = kHidden;
  v1::SessionLimits limits;
  BatchOutputs outputs;
  BatchPlaces places;
  ComputeMode mode = ComputeMode::kLossAndGradients;
};

TEST(CutBatchTest, TakesAsFewChunksAsItCanOfNearlyEqualSize) {
  const Cutter cutter;
  constexpr int64_t kRow = kHidden * 2;
  EXPECT_EQ(cutter.Cut(1).size(), 1U);
  EXPECT_EQ(cutter.Cut(10, 10 * kRow).size(), 1U);
  const auto ranges = cutter.Cut(11, 10 * kRow);  // not ten and one
  ASSERT_EQ(ranges.size(), 2U);
  EXPECT_EQ(ranges[0].tokens, 6);
  EXPECT_EQ(ranges[1].tokens, 5);
  EXPECT_EQ(cutter.Cut((4 << 20) / kRow + 1).size(), 2U);  // 4 MiB unless told otherwise
}

// Rows of seven elements of two bytes: every eighth begins at a multiple of 16.
TEST(CutBatchTest, ChunksInRegionsBeginWhereOffsetsAreAligned) {
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

TEST(CutBatchTest, WhatIsInARegionCostsNoCredit) {
  Cutter cutter;
  int64_t dx = 0;
  cutter.outputs = {.dx_type = DataType::kFloat32, .dx = &dx};
  const int64_t plain = cutter.Cut(1)[0].payload_bytes;
  cutter.places.hidden_states = RegionPlace{};
  EXPECT_EQ(cutter.Cut(1)[0].payload_bytes, plain - kHidden * 2);
  cutter.places.dx = RegionPlace{};
  EXPECT_EQ(cutter.Cut(1)[0].payload_bytes, 8 + 4);
}

TEST(CutBatchTest, LimitsThatLeaveNoAlignedChunkAreSaid) {
  Cutter cutter;
  cutter.hidden = 7;
  cutter.places.hidden_states = RegionPlace{};
  cutter.limits.set_max_chunk_tokens(4);
  EXPECT_TRUE(absl::IsInvalidArgument(cutter.Try(5, 0).status()));
  EXPECT_TRUE(cutter.Try(4, 0).ok());
}

TEST(CutBatchTest, HonoursTheServersLimits) {
  Cutter cutter;
  cutter.limits.set_max_chunk_bytes(5 * kHidden * 2 + 1);
  for (const ChunkRange& range : cutter.Cut(23)) EXPECT_LE(range.tokens, 5);
  cutter.limits.set_max_chunk_tokens(3);
  for (const ChunkRange& range : cutter.Cut(23)) EXPECT_LE(range.tokens, 3);
}

TEST(CutBatchTest, CountsPayloadAsTheCreditDoes) {
  Cutter cutter;
  EXPECT_EQ(cutter.Cut(2)[0].payload_bytes,
            2 * (8 + kHidden * 2 + 4 + kHidden * 2));  // nobody wants dX: narrow
  std::vector<float> dx(2 * kHidden);
  cutter.outputs.dx = dx.data();
  EXPECT_EQ(cutter.Cut(2)[0].payload_bytes, 2 * (8 + kHidden * 2 + 4 + kHidden * 4));
  cutter.outputs.dx = nullptr;
  cutter.mode = ComputeMode::kLossOnly;
  EXPECT_EQ(cutter.Cut(2)[0].payload_bytes, 2 * (8 + kHidden * 2 + 4));
}

TEST(CutBatchTest, TwoChunksFitTheCredit) {
  Cutter cutter;
  cutter.limits.set_byte_credit(1000);
  for (const ChunkRange& range : cutter.Cut(100)) EXPECT_LE(2 * range.payload_bytes, 1000);
  cutter.limits.set_byte_credit(1);
  EXPECT_EQ(cutter.Cut(3).size(), 3U);
}

TEST(CutBatchTest, TokenAboveTheLimitIsRefusedWithBothSizes) {
  Cutter cutter;
  cutter.limits.set_max_chunk_bytes(kHidden * 2 - 1);
  const auto ranges = cutter.Try(1, 0);
  EXPECT_EQ(ranges.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ranges.status().message(),
            "one token of hidden_states has 32 bytes; the server takes chunks of at most 31");
}

}  // namespace
}  // namespace lossd::internal
