// lossd::Session and ignored tokens: they are not sent, and yet every output says what it should of them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "lossd/client.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::session_ignored_test {
namespace {

using testing::Data;
using testing::Fate;
using testing::kHidden;
using testing::SessionTest;

constexpr int64_t kIgnored = -100;

class SessionIgnoredTest : public SessionTest {
 protected:
  // Tokens of all chunks that arrived.
  int64_t Arrived() const {
    int64_t tokens = 0;
    for (const v1::Chunk& chunk : server_.observed().chunks) tokens += chunk.tokens();
    return tokens;
  }
};

// Ignored tokens of `data` at some places.
void Ignore(Data* data, unsigned seed, unsigned one_in) {
  std::mt19937 random(seed);
  for (int64_t& label : data->labels) {
    if (random() % one_in == 0) label = kIgnored;
  }
}

void ExpectOutputs(const Data& data) {
  for (size_t i = 0; i < data.labels.size(); ++i) {
    if (data.labels[i] != kIgnored) {
      data.ExpectOutputs(i, i + 1);
      continue;
    }
    EXPECT_EQ(data.losses[i], 0) << "token " << i;
    for (size_t j = 0; j < kHidden; ++j) EXPECT_EQ(data.dx[i * kHidden + j], 0) << "token " << i;
  }
}

TEST_F(SessionIgnoredTest, OnlyLabelledTokensTravelAndOutputsAreWholeOnAnyLanes) {
  for (const int32_t lanes : {1, 3}) {
    Session session = Open("trainer " + std::to_string(lanes), lanes);
    for (unsigned seed = 0; seed < 10; ++seed) {
      const int64_t before = Arrived();
      Data data(23, seed);
      Ignore(&data, seed, 2);
      const auto result = session.Compute(data.batch(), data.outputs());
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->valid_tokens, CountValid(data.labels));
      EXPECT_EQ(Arrived() - before, CountValid(data.labels));
      ExpectOutputs(data);
    }
  }
}

TEST_F(SessionIgnoredTest, InputsAndReturnsOfEachTokenStayItsOwn) {
  Session session = Open();
  Data data(9);
  data.labels[0] = data.labels[3] = data.labels[4] = data.labels[8] = kIgnored;
  const std::vector<float> lse_gradients = {0, 1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> log_sum_exps(9, -5);
  std::vector<int32_t> predictions(9, -5);
  std::vector<int32_t> top_tokens(18, -5);
  std::vector<float> top_log_probabilities(18, -5);
  Batch batch = data.batch();
  batch.lse_gradients = lse_gradients;
  BatchOutputs outputs = data.outputs();
  outputs.returns = {.log_sum_exp = log_sum_exps,
                     .predictions = predictions,
                     .top_k = 2,
                     .top_tokens = top_tokens,
                     .top_log_probabilities = top_log_probabilities};
  const auto result = session.Compute(batch, outputs);
  ASSERT_TRUE(result.ok()) << result.status();
  for (size_t i = 0; i < 9; ++i) {
    const bool ignored = data.labels[i] == kIgnored;
    EXPECT_EQ(log_sum_exps[i], ignored ? 0 : lse_gradients[i]) << i;
    EXPECT_EQ(predictions[i], ignored ? -1 : data.labels[i]) << i;
    EXPECT_EQ(top_tokens[2 * i + 1], ignored ? -1 : data.labels[i] + 1) << i;
    if (ignored) {
      EXPECT_EQ(top_log_probabilities[2 * i], 0) << i;
    }
  }
}

// As of the second phase of a loss, where tokens were clipped.
TEST_F(SessionIgnoredTest, TokensWhoseFactorsAreAllZeroAreNotSentButCount) {
  Session session = Open();
  Data data(9);
  data.labels[0] = data.labels[5] = kIgnored;
  const std::vector<float> weights = {1, 0, 1, 0, 1, 0, 0, 1, 0};
  const std::vector<float> entropy_gradients = {0, 0, 0, 2, 0, 0, 0, 0, 0};
  Batch batch = data.batch();
  batch.token_weights = weights;
  batch.entropy_gradients = entropy_gradients;
  auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Arrived(), 4) << "2, 3, 4 and 7";
  EXPECT_EQ(result->valid_tokens, 7);
  for (const size_t i : {0, 1, 5, 6, 8}) {
    EXPECT_EQ(data.losses[i], 0) << i;
    for (size_t j = 0; j < kHidden; ++j) EXPECT_EQ(data.dx[i * kHidden + j], 0) << i;
  }
  EXPECT_NE(data.dx[2 * kHidden], 0);

  const std::vector<float> none(9);
  batch.token_weights = none;
  batch.entropy_gradients = none;
  result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Arrived(), 4);
  EXPECT_EQ(result->valid_tokens, 7);
  EXPECT_EQ(result->chunks, 0);
  EXPECT_EQ(data.dx[2 * kHidden], 0);

  // What has no weight is still told.
  std::vector<float> log_sum_exps(9);
  BatchOutputs outputs = data.outputs();
  outputs.returns.log_sum_exp = log_sum_exps;
  ASSERT_TRUE(session.Compute(batch, outputs).ok());
  EXPECT_EQ(Arrived(), 11);
}

TEST_F(SessionIgnoredTest, ABatchWithoutLabelsSendsNothing) {
  Session session = Open();
  Data data(5);
  Ignore(&data, 1, 1);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Arrived(), 0);
  EXPECT_EQ(result->loss, 0);
  EXPECT_EQ(result->valid_tokens, 0);
  EXPECT_TRUE(result->first_sequences.empty());
  ExpectOutputs(data);
  EXPECT_EQ(session.marks().lanes[0].accepted, 0U);
}

TEST_F(SessionIgnoredTest, TheMeanOfNoTokensIsZeroOrAsPyTorchHasIt) {
  Session session = Open();
  for (const int64_t tokens : {0, 4}) {
    Data data(tokens);
    Ignore(&data, 1, 1);
    Batch batch = data.batch();
    batch.reduction = Reduction::kMean;
    EXPECT_EQ(session.Compute(batch, data.outputs())->loss, 0);
    batch.torch_compat = true;
    EXPECT_TRUE(std::isnan(session.Compute(batch, data.outputs())->loss));
    ExpectOutputs(data);
    batch.normalizer = 8;  // of a larger batch, which has tokens
    EXPECT_EQ(session.Compute(batch, data.outputs())->loss, 0);
    batch.normalizer.reset();
    batch.reduction = Reduction::kSum;
    EXPECT_EQ(session.Compute(batch, data.outputs())->loss, 0);
  }
}

TEST_F(SessionIgnoredTest, TheMeanIsOverTheLabelledTokens) {
  Session session = Open();
  Data data(6);
  data.labels[2] = kIgnored;
  Batch batch = data.batch();
  batch.reduction = Reduction::kMean;
  batch.torch_compat = true;
  const auto result = session.Compute(batch, data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->loss, result->loss_sum / 5);
}

TEST_F(SessionIgnoredTest, ARejectedChunkIsNamedByItsPlaceInTheBatch) {
  Session session = Open();
  Data data(8);
  data.labels[0] = data.labels[3] = kIgnored;
  data.hidden[5 * kHidden] = INFINITY;  // chunks are of tokens 1 2, 4 5, 6 7
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_NE(std::string(result.status().message()).find("tokens [4, 6)"), std::string::npos)
      << result.status();
}

TEST_F(SessionIgnoredTest, ACutStreamSendsTheSameTokensAgain) {
  Session session = Open();
  for (const Fate fate : {Fate::kCutBeforeTaking, Fate::kCutBeforeAnswer, Fate::kCutAfterAnswer}) {
    const uint64_t accepted = session.marks().lanes[0].accepted;
    Script(accepted + 2, fate);
    Data data(11, 3);
    Ignore(&data, 7, 3);
    const auto result = session.Compute(data.batch(), data.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->valid_tokens, CountValid(data.labels));
    ExpectOutputs(data);
  }
}

}  // namespace
}  // namespace lossd::session_ignored_test
