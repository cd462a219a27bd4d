// Chunks whose tensors another rank holds: what the leader checks of them is what it checks of others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/chunk/chunk.h"

namespace lossd::engine::held_tensors_test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr kernels::DataType kFloat32 = kernels::DataType::kFloat32;

const HeadConfig kHead{"h", 10, 2, kFloat32};

std::string Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

std::string Labels(const std::vector<int64_t>& labels) {
  return {reinterpret_cast<const char*>(labels.data()), labels.size() * sizeof(int64_t)};
}

Chunk ChunkOf(const std::vector<int64_t>& labels) {
  Chunk chunk;
  chunk.sequence = 1;
  chunk.tokens = static_cast<int64_t>(labels.size());
  chunk.labels = Labels(labels);
  return chunk;
}

void Place(int64_t bytes, int64_t non_finite, Chunk* chunk) {
  PlaceAtRank({.rank = 2, .number = 9, .hidden_bytes = bytes, .non_finite = non_finite},
              std::make_shared<int>(0), chunk);
}

TEST(HeldTensors, AreWhereTheirRankIs) {
  Chunk chunk = ChunkOf({1, 2});
  EXPECT_EQ(chunk.holder(), 0);
  EXPECT_FALSE(chunk.dx_elsewhere());
  PlaceAtRank({.rank = 2, .number = 9, .hidden_bytes = 16, .teacher_bytes = 24}, nullptr, &chunk);
  EXPECT_EQ(chunk.holder(), 2);
  EXPECT_TRUE(chunk.dx_elsewhere());
  EXPECT_EQ(chunk.hidden_states.at_rank().number, 9u);
  EXPECT_EQ(chunk.teacher_hidden.at_rank().number, 9u);
  EXPECT_EQ(chunk.payload_bytes(), 16 + 24 + 16) << "they count against a lane's credit";
  EXPECT_EQ(chunk.kept_bytes(), 16) << "and take no memory here";
  EXPECT_EQ(AnswerBytes(chunk, 2), 2 * 4) << "nor does dX";
}

TEST(HeldTensors, HaveTheirRankAlsoWithoutAByte) {
  Chunk chunk = ChunkOf({1});
  Place(0, 0, &chunk);
  EXPECT_EQ(chunk.holder(), 2);
}

TEST(HeldTensors, AreCheckedAsThoseThatAreHere) {
  const std::vector<std::vector<float>> tensors = {
      {1, 2, 3, 4, 5, 6}, {1, kNaN, 3, 4, 5, kInfinity}, {1, 2, kNaN, kNaN, 5, 6}, {1, 2, 3}, {}};
  for (const std::vector<float>& hidden : tensors) {
    Chunk here = ChunkOf({3, -100, 4});
    here.hidden_states = Payload::Of(Bytes(hidden));
    Chunk there = ChunkOf({3, -100, 4});
    const int64_t bad = CountNonFinite(here.hidden_states, kFloat32, 3, here.labels, -100);
    Place(here.hidden_states.size(), bad, &there);
    EXPECT_EQ(ValidateContent(there, kHead, {}), ValidateContent(here, kHead, {}));
  }
}

TEST(NonFiniteValues, CountInRowsThatAreNotIgnored) {
  const std::string labels = Labels({3, -100, 4});
  const auto count = [&labels](const std::vector<float>& values) {
    return CountNonFinite(Payload::Of(Bytes(values)), kFloat32, 3, labels, -100);
  };
  EXPECT_EQ(count({1, 2, 3, 4, 5, 6}), 0);
  EXPECT_EQ(count({kNaN, 2, kNaN, kInfinity, 5, -kInfinity}), 2);
  EXPECT_EQ(CountNonFinite(Payload::Of(Bytes({kNaN, 2, kNaN})), kFloat32, 3, labels, 7), 2) << "of any width";
}

TEST(NonFiniteValues, AreFoundInPiecesThatEndAnywhere) {
  const std::string bytes = Bytes({kNaN, 2, 3, kInfinity, 5, 6});
  const auto owner = std::make_shared<const std::string>(bytes);
  for (size_t first = 1; first < bytes.size() - 1; ++first) {
    const ByteSpan all = std::as_bytes(std::span(*owner));
    const Payload torn({all.first(first), all.subspan(first, 1), all.subspan(first + 1)}, owner,
                       static_cast<int64_t>(bytes.size()));
    EXPECT_EQ(CountNonFinite(torn, kFloat32, 3, Labels({1, 2, 3}), -100), 2) << first;
  }
}

// Whoever sends a chunk says how many tokens it has; what does not fit is rejected elsewhere.
TEST(NonFiniteValues, AreNotLookedForWhereSizesDoNotFit) {
  const Payload bad = Payload::Of(Bytes({kNaN, kNaN, kNaN}));
  for (const int64_t tokens : {int64_t{0}, int64_t{-1}, int64_t{2}, int64_t{5}, int64_t{12},
                               std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    EXPECT_EQ(CountNonFinite(bad, kFloat32, tokens, Labels({1, 2, 3}), -100), 0) << tokens;
  }
  EXPECT_EQ(CountNonFinite(bad, kFloat32, 3, Labels({1, 2}), -100), 0);
  EXPECT_EQ(CountNonFinite(bad, kFloat32, 3, "", -100), 0);
  EXPECT_EQ(CountNonFinite(bad, kFloat32, 2, Labels({1, 2}), -100), 0) << "6 bytes are no whole elements";
  EXPECT_EQ(CountNonFinite(Payload(), kFloat32, 1, Labels({1}), -100), 0);
}

}  // namespace
}  // namespace lossd::engine::held_tensors_test
