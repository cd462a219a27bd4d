// lossd::Session and soft targets: what chunks carry, also when a stream breaks, and what of lists is
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::session_distillation_test {
namespace {

using testing::Data;
using testing::Fate;
using ::testing::HasSubstr;
using testing::SessionTest;

constexpr int64_t kTeacherHidden = 2;

template <typename Value>
std::vector<Value> ValuesOf(const std::string& bytes) {
  std::vector<Value> values(bytes.size() / sizeof(Value));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The i-th token's are 2i and 2i + 1.
struct TaughtData : Data {
  explicit TaughtData(int64_t tokens) : Data(tokens) {
    for (int64_t i = 0; i < tokens * kTeacherHidden; ++i) teacher_hidden.push_back(static_cast<float>(i));
  }
  Batch batch() const {
    Batch batch = Data::batch();
    batch.distillation = {
        .teacher = "large", .hidden_size = kTeacherHidden, .hidden_states = teacher_hidden.data()};
    return batch;
  }

  std::vector<float> teacher_hidden;
};

// The i-th of five tokens has a list of i + 1 tokens, of which the first is i. The third one is ignored.
struct ListedData : Data {
  ListedData() : Data(5) {
    labels[2] = -100;
    for (int32_t i = 0; i < 5; ++i) {
      for (int32_t k = 0; k <= i; ++k) {
        tokens.push_back(i + k);
        probabilities.push_back(static_cast<float>(i + k) / 64);
      }
      offsets.push_back(static_cast<int64_t>(tokens.size()));
    }
  }
  Batch batch() const {
    Batch batch = Data::batch();
    batch.target_lists = {.lists = {.offsets = offsets, .tokens = tokens},
                          .probabilities = probabilities,
                          .weight = 0.5F,
                          .label_weight = 0.25F};
    return batch;
  }

  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> tokens;
  std::vector<float> probabilities;
};

using SessionDistillationTest = SessionTest;

// Also of chunks whose first answer was lost.
TEST_F(SessionDistillationTest, DivergencesComeToTheirPlaceAndResentChunksCarryTheTeachersHiddenStatesAgain) {
  Script(2, Fate::kCutBeforeAnswer);
  Session session = Open();
  TaughtData data(5);
  std::vector<float> divergences(5);
  BatchOutputs outputs = data.outputs();
  outputs.returns.divergences = divergences;
  const auto result = session.Compute(data.batch(), outputs);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(session.reconnects(), 1);
  EXPECT_EQ(result->repeated_chunks, 1);
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(divergences[i], static_cast<float>(data.labels[i]) / 2);
  for (const v1::Chunk& chunk : fake_.observed().chunks) {
    EXPECT_TRUE(chunk.options().returns().divergences());
    EXPECT_EQ(ValuesOf<float>(chunk.teacher_hidden_states()).at(0),
              static_cast<float>(chunk.first_token() * kTeacherHidden));
  }
}

TEST_F(SessionDistillationTest, ListsOfSoftTargetsAreCutWithTheTokensThatAreSent) {
  Script(2, Fate::kCutBeforeAnswer);
  Session session = Open();
  ListedData data;
  std::vector<float> divergences(5);
  BatchOutputs outputs = data.outputs();
  outputs.returns.divergences = divergences;
  const auto result = session.Compute(data.batch(), outputs);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->repeated_chunks, 1);
  EXPECT_EQ(divergences[1], static_cast<float>(data.labels[1]) / 2);
  EXPECT_EQ(divergences[4], static_cast<float>(data.labels[4]) / 2);
  const std::vector<v1::Chunk> chunks = fake_.observed().chunks;
  ASSERT_EQ(chunks.size(), 3U);  // the second one twice
  for (size_t i = 0; i < chunks.size(); ++i) {
    const v1::TargetLists& targets = chunks[i].token_inputs().target_lists();
    EXPECT_EQ(targets.weight(), 0.5F);
    EXPECT_EQ(targets.label_weight(), 0.25F);
    const std::vector<int32_t> ids =
        i == 0 ? std::vector<int32_t>{0, 1, 2} : std::vector<int32_t>{3, 4, 5, 6, 4, 5, 6, 7, 8};
    EXPECT_EQ(ValuesOf<int64_t>(targets.lists().offsets()),
              i == 0 ? (std::vector<int64_t>{0, 1, 3}) : (std::vector<int64_t>{0, 4, 9}));
    EXPECT_EQ(ValuesOf<int32_t>(targets.lists().ids()), ids);
    std::vector<float> probabilities;
    for (const int32_t id : ids) probabilities.push_back(static_cast<float>(id) / 64);
    EXPECT_EQ(ValuesOf<float>(targets.probabilities()), probabilities);
  }
}

TEST_F(SessionDistillationTest, ListsOfSoftTargetsThatCannotBeAreRefusedBeforeAnythingIsSent) {
  struct Case {
    std::function<void(Batch&)> spoil;
    std::string message;
  };
  Session session = Open();
  ListedData data;
  const std::vector<Case> cases = {
      {[](Batch& b) { b.target_lists.lists.offsets = b.target_lists.lists.offsets.first(5); },
       "target_lists.lists.offsets has 5 values; labels has 5, so there must be 6"},
      {[](Batch& b) { b.target_lists.lists.offsets = {}; },
       "target_lists.lists.tokens has 15 values but there are no offsets"},
      {[](Batch& b) { b.target_lists.lists = {}; },
       "target_lists.probabilities has 15 values, but target_lists.lists.tokens has 0; they must be equal"},
      {[](Batch& b) { b.target_lists.probabilities = b.target_lists.probabilities.first(14); },
       "target_lists.probabilities has 14 values, but target_lists.lists.tokens has 15; they must be equal"},
      {[](Batch& b) { b.target_lists.lists.tokens = b.target_lists.lists.tokens.first(14); },
       "target_lists.lists.tokens has 14 values, but target_lists.lists.offsets[5] is 15"},
      {[](Batch& b) { b.target_lists.weight = -1; },
       "target_lists.weight is -1; it must be finite and at least 0"},
      {[](Batch& b) { b.target_lists.label_weight = std::numeric_limits<float>::quiet_NaN(); },
       "target_lists.label_weight is nan; it must be finite and at least 0"},
      {[](Batch& b) { b.kept_tokens = b.target_lists.lists; }, "kept_tokens and target_lists are given"},
  };
  for (const Case& bad : cases) {
    Batch batch = data.batch();
    bad.spoil(batch);
    const absl::Status status = session.Compute(batch, data.outputs()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
  EXPECT_TRUE(fake_.observed().chunks.empty());
}

TEST_F(SessionDistillationTest, AServerWithoutListsOfSoftTargetsIsSentNone) {
  fake_.features.erase("target_lists");
  Session session = Open();
  ListedData data;
  const absl::Status status = session.Compute(data.batch(), data.outputs()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'target_lists'"));
  EXPECT_TRUE(fake_.observed().chunks.empty());
}

}  // namespace
}  // namespace lossd::session_distillation_test
