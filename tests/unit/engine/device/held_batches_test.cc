// What other ranks answer goes to where the engine wants it.
#include "server/engine/device/sharded/held_batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace lossd::engine::held_batches_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::string Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// To a chunk of batch 4.
AnsweredChunk AnswerOf(uint32_t chunk, const std::vector<float>& losses,
                       const std::vector<float>& entropies) {
  AnsweredChunk answer{.batch = 4, .chunk = chunk, .losses = Bytes(losses), .returns = {}};
  answer.returns.entropies = Bytes(entropies);
  return answer;
}

TEST(HeldBatches, PutLossesAndReturnsWhereTheirChunkWantsThem) {
  std::vector<float> losses(3);
  std::vector<float> entropies(3);
  std::vector<ChunkRows> chunks(2);
  chunks[0] = {.tokens = 1, .losses = &losses[0], .returns = {.entropy = &entropies[0]}};
  chunks[1] = {.tokens = 2, .losses = &losses[1], .returns = {.entropy = &entropies[1]}};
  HeldBatches batches;
  std::vector<size_t> told;
  batches.Start(4, chunks, [&](size_t chunk) {
    told.push_back(chunk);
    EXPECT_NE(losses[chunk], 0) << "they are there when it is told of";
  });
  batches.Answer(AnswerOf(0, {1}, {10}));
  EXPECT_THAT(losses, ElementsAre(1, 0, 0));
  batches.Answer(AnswerOf(1, {2, 3}, {20, 30}));
  EXPECT_THAT(losses, ElementsAre(1, 2, 3));
  EXPECT_THAT(entropies, ElementsAre(10, 20, 30));
  EXPECT_THAT(told, ElementsAre(0, 1));
}

// Its memory may be gone.
TEST(HeldBatches, LeaveABatchAloneThatHasEnded) {
  std::vector<float> losses(1);
  const std::vector<ChunkRows> chunks = {{.tokens = 1, .losses = losses.data()}};
  HeldBatches batches;
  std::vector<size_t> told;
  batches.Start(1, chunks, [&](size_t chunk) { told.push_back(chunk); });
  batches.End(1);
  batches.Answer({.batch = 1, .chunk = 0, .losses = Bytes({1}), .returns = {}});
  EXPECT_THAT(told, IsEmpty());
  EXPECT_THAT(losses, ElementsAre(0));
}

}  // namespace
}  // namespace lossd::engine::held_batches_test
