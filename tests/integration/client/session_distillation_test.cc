// lossd::Session and soft targets: what chunks carry, what comes back, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/client/session_fixture.h"
#include "tests/unit/client/session_data.h"

namespace lossd::session_distillation_test {
namespace {

using testing::Data;
using ::testing::HasSubstr;
using testing::kVocab;
using testing::SessionTest;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kTeacherHidden = 2;

std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
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
    EXPECT_EQ(Floats(chunk.teacher_hidden_states()),
              std::vector<float>(first, first + chunk.tokens() * kTeacherHidden));
    tokens += chunk.tokens();
  }
  EXPECT_EQ(tokens, 7);
  EXPECT_EQ(result->divergence_sum, 3.5);
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

}  // namespace
}  // namespace lossd::session_distillation_test
