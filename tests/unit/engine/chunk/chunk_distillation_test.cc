// What a chunk says of soft targets: what is refused, and what it comes to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/batch_key.h"

namespace lossd::engine::chunk_distillation_test {
namespace {

using kernels::DataType;
using kernels::Divergence;
using ::testing::HasSubstr;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

HeadConfig Student() { return {.name = "h", .vocab_size = 4, .hidden_size = 2}; }
HeadConfig Teacher() {
  return {.name = "t", .vocab_size = 4, .hidden_size = 3, .weight_type = DataType::kFloat32};
}

std::string Bytes(const std::vector<float>& values) {
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The second one is ignored.
Chunk TwoTokens() {
  Chunk chunk;
  chunk.tokens = 2;
  const std::vector<int64_t> labels = {1, -100};
  chunk.labels.assign(reinterpret_cast<const char*>(labels.data()), 16);
  chunk.hidden_states = Payload::Of(std::string(16, '\0'));
  chunk.teacher_hidden = Payload::Of(std::string(24, '\0'));
  chunk.options.distillation = ChunkDistillation{.teacher = "t"};
  return chunk;
}

absl::Status Validate(const Chunk& chunk, const ChunkLimits& limits = {}) {
  const HeadConfig teacher = Teacher();
  return ValidateContent(chunk, Student(), limits, &teacher);
}

TEST(ChunkDistillation, WhatCannotBeComputedIsRefusedByNameAndValue) {
  struct Case {
    std::function<void(Chunk&)> spoil;
    std::string field;
    std::string message;
  };
  const auto loss = [](auto set) { return [set](Chunk& c) { set(c.options.distillation->loss); }; };
  const std::vector<Case> cases = {
      {loss([](auto& l) { l.temperature = 0; }), "options.distillation.temperature",
       "is 0; it must be finite and above 0"},
      {loss([](auto& l) { l.temperature = kNaN; }), "options.distillation.temperature", "is nan"},
      {loss([](auto& l) { l.temperature = kInfinity; }), "options.distillation.temperature", "is inf"},
      {loss([](auto& l) { l.weight = -1; }), "options.distillation.weight",
       "is -1; it must be finite and at least 0"},
      {loss([](auto& l) { l.weight = kNaN; }), "options.distillation.weight", "is nan"},
      {loss([](auto& l) { l.label_weight = -0.5f; }), "options.distillation.label_weight", "is -0.5"},
      {loss([](auto& l) { l.label_weight = kInfinity; }), "options.distillation.label_weight", "is inf"},
      {loss([](auto& l) {
         l.divergence = Divergence::kJensenShannon;
         l.beta = 0;
       }),
       "options.distillation.beta", "is 0; it must be above 0 and below 1"},
      {loss([](auto& l) {
         l.divergence = Divergence::kJensenShannon;
         l.beta = 1;
       }),
       "options.distillation.beta", "is 1;"},
      {loss([](auto& l) {
         l.divergence = Divergence::kJensenShannon;
         l.beta = kNaN;
       }),
       "options.distillation.beta", "is nan"},
      {[](Chunk& c) { c.teacher_hidden = Payload::Of(std::string(23, '\0')); }, "teacher_hidden_states",
       "holds 23 bytes; [2, 3] of float32 are 24"},
      {[](Chunk& c) { c.teacher_hidden = {}; }, "teacher_hidden_states", "holds 0 bytes"},
      {[](Chunk& c) { c.options.distillation->hidden_type = DataType::kBFloat16; }, "teacher_hidden_states",
       "holds 24 bytes; [2, 3] of bfloat16 are 12"},
      {[](Chunk& c) {
         c.teacher_hidden = Payload::Of(Bytes({0, kNaN, -kInfinity, 0, 0, 0}));
       },
       "teacher_hidden_states", "holds 2 non-finite values of 6"},
  };
  EXPECT_TRUE(Validate(TwoTokens()).ok());
  for (const Case& bad : cases) {
    Chunk chunk = TwoTokens();
    bad.spoil(chunk);
    const absl::Status status = Validate(chunk);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_EQ(FieldOf(status), bad.field);
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
}

TEST(ChunkDistillation, WhatTheTeacherSawOfIgnoredTokensMayBeAnything) {
  Chunk chunk = TwoTokens();
  chunk.teacher_hidden = Payload::Of(Bytes({0, 0, 0, kNaN, kInfinity, 0}));
  EXPECT_TRUE(Validate(chunk).ok());
}

TEST(ChunkDistillation, ATeacherOfAnotherVocabularyIsRefused) {
  HeadConfig teacher = Teacher();
  teacher.vocab_size = 5;
  const absl::Status status = ValidateContent(TwoTokens(), Student(), {}, &teacher);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(status), "options.distillation.teacher");
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("head h has 4: if its last rows are padding, write the first 4 rows"));
}

TEST(ChunkDistillation, TheLimitOfAChunkIsOfBothHiddenStates) {
  EXPECT_TRUE(Validate(TwoTokens(), {.max_chunk_bytes = 40}).ok());
  const absl::Status status = Validate(TwoTokens(), {.max_chunk_bytes = 39});
  EXPECT_EQ(ReasonOf(status), RejectReason::kChunkTooLarge);
  EXPECT_EQ(FieldOf(status), "teacher_hidden_states");
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("are 16 bytes and teacher_hidden_states 24; the limit of a chunk is 39 for both"));
}

TEST(ChunkDistillation, WithoutATeacherNothingOfItIsTaken) {
  Chunk chunk = TwoTokens();
  chunk.options.distillation.reset();
  const absl::Status hidden = ValidateContent(chunk, Student(), {});
  EXPECT_EQ(FieldOf(hidden), "teacher_hidden_states");
  EXPECT_THAT(std::string(hidden.message()),
              HasSubstr("holds 24 bytes, but options.distillation is not set"));
  chunk.teacher_hidden = {};
  EXPECT_TRUE(ValidateContent(chunk, Student(), {}).ok());
  chunk.options.returns.divergence = true;
  EXPECT_EQ(FieldOf(ValidateContent(chunk, Student(), {})), "options.returns.divergences");
}

TEST(ChunkDistillation, BytesUnderWayAreThoseOfBothHiddenStatesAndGoWhenAChunkIsRejected) {
  Chunk chunk = TwoTokens();
  EXPECT_EQ(chunk.payload_bytes(), 16 + 16 + 24);
  EXPECT_GE(chunk.kept_bytes(), 16 + 16 + 24);
  chunk.DropPayload();
  EXPECT_EQ(chunk.payload_bytes(), 0);
}

TEST(ChunkDistillation, AKindIsOfATeacherAndOfTheNumbersThatMeanSomething) {
  const HeadConfig teacher = Teacher();
  const auto* backend = reinterpret_cast<const HeadBackend*>(&teacher);  // only compared
  const auto kind = [&](auto set) {
    Chunk chunk = TwoTokens();
    set(chunk.options.distillation->loss);
    return KindOf(chunk, Student(), &teacher, backend);
  };
  const BatchKey plain = kind([](auto&) {});
  EXPECT_EQ(plain.teacher.hidden_size, 3);
  EXPECT_EQ(plain.teacher.weight_type, DataType::kFloat32);
  EXPECT_EQ(plain, kind([](auto& l) { l.beta = 0.25f; })) << "of Jensen and Shannon's alone";
  EXPECT_NE(plain, kind([](auto& l) { l.divergence = Divergence::kReverseKl; }));
  EXPECT_NE(plain, kind([](auto& l) { l.temperature = 2; }));
  EXPECT_NE(plain, kind([](auto& l) { l.weight = 2; }));
  EXPECT_NE(plain, kind([](auto& l) { l.label_weight = 2; }));
  const auto shannon = [&](float beta) {
    return kind([beta](auto& l) {
      l.divergence = Divergence::kJensenShannon;
      l.beta = beta;
    });
  };
  EXPECT_NE(shannon(0.25f), shannon(0.5f));
  EXPECT_NE(plain, KindOf(TwoTokens(), Student()));
}

TEST(ChunkDistillation, TheSumOfDivergencesIsWeightedAndLeavesIgnoredTokensOut) {
  Chunk chunk = TwoTokens();
  chunk.tokens = 3;
  const std::vector<int64_t> labels = {3, -100, 2};
  chunk.labels.assign(reinterpret_cast<const char*>(labels.data()), 24);
  ChunkAnswer answer;
  answer.losses = Bytes({1, 8, 2});
  answer.returns.divergences = Bytes({0.5f, 7, 0.25f});
  SumTokens(chunk, nullptr, &answer);
  EXPECT_EQ(answer.divergence_sum, 0.75);
  answer.divergence_sum = 0;
  chunk.token_weights = Bytes({2, 3, 4});
  SumTokens(chunk, nullptr, &answer);
  EXPECT_EQ(answer.divergence_sum, 2);
}

TEST(ChunkDistillation, AnAnswerCountsDivergences) {
  Chunk chunk = TwoTokens();
  chunk.mode = ComputeMode::kLossOnly;
  TokenReturns returns;
  Allocate(ReturnsOf(chunk), chunk.tokens, &returns);
  EXPECT_EQ(returns.divergences.size(), 8U);
  EXPECT_EQ(returns.bytes() + 2 * 4, AnswerBytes(chunk, 2));
}

}  // namespace
}  // namespace lossd::engine::chunk_distillation_test
