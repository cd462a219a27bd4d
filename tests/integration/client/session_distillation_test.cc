// lossd::Session and soft targets: what chunks carry, also when a stream breaks, what comes back, what is
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "lossd/v1/status.pb.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::session_distillation_test {
namespace {

using testing::Data;
using testing::Fate;
using ::testing::HasSubstr;
using testing::kVocab;
using testing::SessionTest;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
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

class SessionDistillationTest : public SessionTest {
 protected:
  void SetUp() override {
    Connect();
    const HeadConfig teacher{.name = "large",
                             .vocab_size = kVocab,
                             .hidden_size = kTeacherHidden,
                             .weight_type = DataType::kFloat32};
    ASSERT_TRUE(client_->CreateHead(teacher).ok());
    server_.Publish(teacher.name);
  }
};

TEST_F(SessionDistillationTest, EveryChunkCarriesTheOptionsAndItsShareOfTheTeachersHiddenStates) {
  Session session = Open("trainer", 2);
  TaughtData data(7);
  Batch batch = data.batch();
  batch.distillation->divergence = Divergence::kJensenShannon;
  batch.distillation->beta = 0.25F;
  batch.distillation->temperature = 2;
  batch.distillation->weight = 0.5F;
  batch.distillation->label_weight = 0.75F;
  const auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  int64_t tokens = 0;
  for (const v1::Chunk& chunk : server_.observed().chunks) {
    const v1::Distillation& soft = chunk.options().distillation();
    EXPECT_EQ(soft.teacher(), "large");
    EXPECT_EQ(soft.hidden_dtype(), v1::DATA_TYPE_FLOAT32);
    EXPECT_EQ(soft.divergence(), v1::DIVERGENCE_JENSEN_SHANNON);
    EXPECT_EQ(soft.beta(), 0.25F);
    EXPECT_EQ(soft.temperature(), 2.0F);
    EXPECT_EQ(soft.weight(), 0.5F);
    EXPECT_EQ(soft.label_weight(), 0.75F);
    EXPECT_FALSE(soft.has_hidden_states_region());
    EXPECT_FALSE(chunk.options().returns().divergences());
    const auto first = data.teacher_hidden.begin() + chunk.first_token() * kTeacherHidden;
    EXPECT_EQ(ValuesOf<float>(chunk.teacher_hidden_states()),
              std::vector<float>(first, first + chunk.tokens() * kTeacherHidden));
    tokens += chunk.tokens();
  }
  EXPECT_EQ(tokens, 7);
  double divergence = 0;
  for (const int64_t label : data.labels) divergence += static_cast<double>(label) / 2;
  EXPECT_EQ(result->divergence_sum, divergence);
  EXPECT_EQ(result->teacher_weight_version, 1U);
}

// A chunk has at most as many bytes of both together as the session asked for.
TEST_F(SessionDistillationTest, ChunksAreCutByTheBytesOfBothHiddenStates) {
  Session session = Open();
  TaughtData data(8);
  ASSERT_TRUE(session.Compute(data.Data::batch(), data.outputs()).ok());
  EXPECT_EQ(server_.observed().chunks.size(), 4U);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  EXPECT_EQ(server_.observed().chunks.size(), 4U + 8U);
}

TEST_F(SessionDistillationTest, ABatchThatMetDifferentTeachersIsOfVersionZero) {
  server_.Before(2, [this] {
    server_.AwaitApplied(1);
    server_.Publish("large");
  });
  Session session = Open();
  TaughtData data(4);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->teacher_weight_version, 0U);
}

TEST_F(SessionDistillationTest, AMeanDividesTheDivergenceLikeTheCrossEntropy) {
  Session session = Open();
  TaughtData data(4);
  Batch batch = data.batch();
  batch.reduction = Reduction::kMean;
  batch.normalizer = 16;
  const auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->loss, result->loss_sum / 16);
  EXPECT_EQ(server_.observed().chunks.back().gradient_scale(), 1.0F / 16);
}

TEST_F(SessionDistillationTest, WhatCannotBeComputedIsRefusedBeforeAnythingIsSent) {
  static std::vector<float> room(2);
  struct Case {
    std::function<void(Batch&, BatchOutputs&)> spoil;
    std::string message;
  };
  const auto soft = [](auto set) { return [set](Batch& b, BatchOutputs&) { set(*b.distillation); }; };
  const std::vector<Case> cases = {
      {soft([](auto& d) { d.teacher.clear(); }), "distillation.teacher is empty"},
      {soft([](auto& d) { d.hidden_size = 0; }), "distillation.hidden_size is 0; it must be at least 1"},
      {soft([](auto& d) { d.hidden_states = nullptr; }), "distillation.hidden_states is null"},
      {soft([](auto& d) { d.temperature = 0; }),
       "distillation.temperature is 0; it must be finite and above"},
      {soft([](auto& d) { d.temperature = kNaN; }), "distillation.temperature is nan"},
      {soft([](auto& d) { d.weight = -1; }), "distillation.weight is -1; it must be finite and at least 0"},
      {soft([](auto& d) { d.label_weight = kNaN; }), "distillation.label_weight is nan"},
      {soft([](auto& d) {
         d.divergence = Divergence::kJensenShannon;
         d.beta = 1;
       }),
       "distillation.beta is 1; it must be above 0 and below 1"},
      {[](Batch& b, BatchOutputs& o) {
         b.distillation.reset();
         o.returns.divergences = room;
       },
       "divergences has room for 2 tokens but there is no distillation"},
  };
  Session session = Open();
  TaughtData data(2);
  for (const Case& bad : cases) {
    Batch batch = data.batch();
    BatchOutputs outputs = data.outputs();
    bad.spoil(batch, outputs);
    const absl::Status status = session.Compute(batch, outputs).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
  EXPECT_TRUE(server_.observed().chunks.empty());
}

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
  for (const v1::Chunk& chunk : server_.observed().chunks) {
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
  const std::vector<v1::Chunk> chunks = server_.observed().chunks;
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
  EXPECT_TRUE(server_.observed().chunks.empty());
}

TEST_F(SessionDistillationTest, AServerWithoutListsOfSoftTargetsIsSentNone) {
  server_.recorder().Edit<v1::GetStatusResponse>("GetStatus", [](auto* status) {
    auto* features = status->mutable_features();
    features->erase(std::remove(features->begin(), features->end(), "target_lists"), features->end());
  });
  Connect();
  Session session = Open();
  ListedData data;
  const absl::Status status = session.Compute(data.batch(), data.outputs()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'target_lists'"));
  EXPECT_TRUE(server_.observed().chunks.empty());
}

}  // namespace
}  // namespace lossd::session_distillation_test
