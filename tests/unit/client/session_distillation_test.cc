// lossd::Session and soft targets when a stream breaks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::session_distillation_test {
namespace {

using testing::Data;
using testing::Fate;
using testing::SessionTest;

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

class SessionDistillationTest : public SessionTest {};

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
    EXPECT_EQ(Floats(chunk.teacher_hidden_states()).at(0),
              static_cast<float>(chunk.first_token() * kTeacherHidden));
  }
}

}  // namespace
}  // namespace lossd::session_distillation_test
