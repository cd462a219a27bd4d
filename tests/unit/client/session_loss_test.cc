// lossd::Session and what is returned of each token, at a server that loses or shortens answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_data.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::session_loss_test {
namespace {

using testing::Data;
using testing::Fate;
using ::testing::HasSubstr;
using testing::SessionTest;

class SessionLossTest : public SessionTest {};

// Also of chunks whose first answer was lost.
TEST_F(SessionLossTest, ReturnsOfEveryTokenComeToItsPlace) {
  Script(2, Fate::kCutBeforeAnswer);
  Session session = Open();
  Data data(7);
  std::vector<float> lse_gradients = {-1, -2, -3, -4, -5, -6, -7};
  std::vector<float> log_sum_exp(7);
  std::vector<float> entropies(7);
  std::vector<int32_t> predictions(7);
  std::vector<int32_t> top_tokens(21);
  Batch batch = data.batch();
  batch.lse_gradients = lse_gradients;
  BatchOutputs outputs = data.outputs();
  outputs.returns = {.log_sum_exp = log_sum_exp,
                     .entropies = entropies,
                     .predictions = predictions,
                     .top_k = 3,
                     .top_tokens = top_tokens};
  const auto result = session.Compute(batch, outputs);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(session.reconnects(), 1);
  EXPECT_EQ(result->correct_tokens, 7);
  EXPECT_EQ(log_sum_exp, lse_gradients);
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_EQ(entropies[i], static_cast<float>(data.labels[i]));
    EXPECT_EQ(predictions[i], data.labels[i]);
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(top_tokens[i * 3 + k], data.labels[i] + static_cast<int64_t>(k));
    }
  }
}

TEST_F(SessionLossTest, AnAnswerWithOtherReturnsThanAskedForIsAnError) {
  fake_.short_returns = true;
  Session session = Open();
  Data data(2);
  std::vector<float> entropies(2, -1);
  BatchOutputs outputs = data.outputs();
  outputs.returns.entropies = entropies;
  const absl::Status status = session.Compute(data.batch(), outputs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("4 bytes of entropies; 2 tokens have 8"));
  EXPECT_EQ(entropies, std::vector<float>(2, -1));
}

}  // namespace
}  // namespace lossd::session_loss_test
