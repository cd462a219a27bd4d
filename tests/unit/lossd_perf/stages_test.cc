#include "client/tools/perf/stages.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

namespace lossd::perf::stages_test {
namespace {

ChunkTiming::Time At(int64_t milliseconds) {
  return ChunkTiming::Time(std::chrono::milliseconds(milliseconds));
}

// Sent at `start`; upload 10, checked 1, waits 2, copied in 4, behind another 5, computed 20, copied out 3,
// answered 1, download 7: all in milliseconds.
ChunkTiming Chunk(int64_t start) {
  return {.tokens = 1,
          .sent = At(start),
          .received = At(start + 10),
          .accepted = At(start + 11),
          .started = At(start + 13),
          .input_ready = At(start + 17),
          .compute_started = At(start + 22),
          .computed = At(start + 42),
          .output_ready = At(start + 45),
          .answered = At(start + 46),
          .arrived = At(start + 53),
          .clock_error = std::chrono::microseconds(50)};
}

TEST(StagesTest, StagesOfAChunkAddUpToItsWay) {
  const std::vector<ChunkTiming> timings = {Chunk(1000)};
  const StageSamples samples = SplitIntoStages(timings);
  ASSERT_EQ(samples.upload.size(), 1U);
  EXPECT_DOUBLE_EQ(samples.upload[0], 0.010);
  EXPECT_DOUBLE_EQ(samples.queue[0], 0.008);
  EXPECT_DOUBLE_EQ(samples.copy[0], 0.007);
  EXPECT_DOUBLE_EQ(samples.compute[0], 0.020);
  EXPECT_DOUBLE_EQ(samples.download[0], 0.008);
  EXPECT_DOUBLE_EQ(samples.clock_error, 50e-6);
  EXPECT_DOUBLE_EQ(
      samples.upload[0] + samples.queue[0] + samples.copy[0] + samples.compute[0] + samples.download[0],
      0.053);
}

TEST(StagesTest, NothingOfALoneChunkIsHidden) {
  const std::vector<ChunkTiming> timings = {Chunk(0)};
  const auto share = HiddenShare(timings);
  ASSERT_TRUE(share.has_value());
  EXPECT_DOUBLE_EQ(*share, 0);
}

TEST(StagesTest, WhatHappensWhileAnotherChunkIsComputedIsHidden) {
  // Computing: [22, 42] and [52, 72]. Of each chunk 25 ms move: 10 up, 4 in, 3 out, 8 down. The second one is
  // uploaded in [30, 40], 10 ms hidden, and copied in at [43, 47], when nothing is computed. The first one's
  // answer leaves in [42, 53]: 1 ms hidden.
  const std::vector<ChunkTiming> timings = {Chunk(0), Chunk(30)};
  EXPECT_DOUBLE_EQ(HiddenShare(timings).value_or(-1), 11.0 / 50.0);
}

TEST(StagesTest, TheWeightGradientHidesAsWell) {
  std::vector<ChunkTiming> timings = {Chunk(0), Chunk(30)};
  timings[1].earlier_done = At(50);  // dW of the first: [42, 50]
  // More of it: the second one's copy in, 4, and of the first one's way back 8.
  EXPECT_DOUBLE_EQ(HiddenShare(timings).value_or(-1), 23.0 / 50.0);
}

TEST(StagesTest, ChunksOfOneBatchAreComputedOnce) {
  std::vector<ChunkTiming> timings = {Chunk(0), Chunk(0), Chunk(0)};
  for (ChunkTiming& timing : timings) timing.earlier_done = At(5);
  EXPECT_DOUBLE_EQ(HiddenShare(timings).value_or(-1), 0);
}

TEST(StagesTest, WithoutChunksThereIsNoShare) { EXPECT_FALSE(HiddenShare({}).has_value()); }

}  // namespace
}  // namespace lossd::perf::stages_test
