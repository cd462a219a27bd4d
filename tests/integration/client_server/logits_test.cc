// Logits through the client library: what they are, how many calls they take, and what they do not disturb.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/client_server/client_server_fixture.h"

namespace lossd::testing::logits_test {
namespace {

using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

TestServerOptions WithCallsOf(int64_t bytes) {
  TestServerOptions options;
  options.engine.chunk_limits.max_chunk_bytes = bytes;
  options.engine.lane_credit_bytes = 4 * bytes;
  return options;
}

std::vector<float> Expected(const std::vector<float>& hidden, const std::vector<float>& weights) {
  const size_t rows = hidden.size() / kHidden;
  std::vector<float> logits(rows * kVocab);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t v = 0; v < kVocab; ++v) {
      double sum = 0;
      for (size_t h = 0; h < kHidden; ++h) sum += double{hidden[r * kHidden + h]} * weights[v * kHidden + h];
      logits[r * kVocab + v] = static_cast<float>(sum);
    }
  }
  return logits;
}

class ClientServerLogitsTest : public ClientServerTest {
 protected:
  absl::StatusOr<uint64_t> Read(const Head& head, const std::vector<float>& hidden,
                                std::vector<float>* logits) {
    const size_t rows = hidden.size() / kHidden;
    logits->assign(rows * kVocab, -1.0F);
    return head.Logits({.rows = static_cast<int64_t>(rows), .hidden_states = hidden.data()},
                       {.logits = logits->data()});
  }
  uint64_t calls() const { return server_->engine().counters().logits_calls; }

  const std::vector<float> weights_ = RandomFloats(kVocab * kHidden, 1);
};

TEST_F(ClientServerLogitsTest, AreTheProductsOfTheRowsAndTheWeights) {
  StartWithWeights();
  const std::vector<float> hidden = RandomFloats(7 * kHidden, 2);
  std::vector<float> logits;
  const auto version = Read(*head_, hidden, &logits);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 1U);
  EXPECT_THAT(logits, Pointwise(FloatNear(1e-5F), Expected(hidden, weights_)));
  EXPECT_EQ(calls(), 1U);
}

TEST_F(ClientServerLogitsTest, OfManyRowsComeInAsFewCallsAsTheServerLetsThem) {
  // Eight rows of 61 logits in fp32.
  StartWithWeights(WithCallsOf(8 * kVocab * 4 + 100));
  const std::vector<float> hidden = RandomFloats(50 * kHidden, 2);
  std::vector<float> logits;
  const auto version = Read(*head_, hidden, &logits);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_THAT(logits, Pointwise(FloatNear(1e-5F), Expected(hidden, weights_)));
  EXPECT_EQ(calls(), 7U);
  EXPECT_EQ(server_->engine().counters().logits_rows, 50U);
  // The largest ones are little to send: hidden states of 26 rows are what a call takes.
  std::vector<int32_t> tokens(50 * 3);
  std::vector<float> top(50 * 3);
  std::vector<float> log_sum_exp(50);
  const auto top_version =
      head_->Logits({.rows = 50, .hidden_states = hidden.data()},
                    {.top_k = 3, .top_tokens = tokens, .top_logits = top, .log_sum_exp = log_sum_exp});
  ASSERT_TRUE(top_version.ok()) << top_version.status();
  EXPECT_EQ(calls(), 9U);
  for (size_t r = 0; r < 50; ++r) {
    double sum = 0;
    for (size_t v = 0; v < kVocab; ++v) sum += std::exp(double{logits[r * kVocab + v]});
    EXPECT_NEAR(log_sum_exp[r], std::log(sum), 1e-5);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(top[r * 3 + i], logits[r * kVocab + static_cast<size_t>(tokens[r * 3 + i])]);
    }
  }
}

TEST_F(ClientServerLogitsTest, OptionsAndTypesReachTheServer) {
  Start();
  auto head = client_->CreateHead({.name = "biased",
                                   .vocab_size = kVocab,
                                   .hidden_size = kHidden,
                                   .weight_type = DataType::kFloat32,
                                   .logit_scale = 2.0F,
                                   .bias = true});
  ASSERT_TRUE(head.ok()) << head.status();
  const std::vector<float> bias(kVocab, 0.25F);
  ASSERT_TRUE(head->WriteWeights(DataType::kFloat32, weights_.data(), bias).ok());
  const std::vector<float> hidden = RandomFloats(3 * kHidden, 2);
  std::vector<float> expected = Expected(hidden, weights_);
  std::vector<float> logits(3 * kVocab);
  LogitsBatch batch{.rows = 3, .hidden_states = hidden.data(), .logit_scale = 1.0F, .bias = Bias::kIgnore};
  ASSERT_TRUE(head->Logits(batch, {.logits = logits.data()}).ok());
  EXPECT_THAT(logits, Pointwise(FloatNear(1e-5F), expected));
  for (float& logit : expected) logit = 1.5F * std::tanh(2 * (logit + 0.25F) / 1.5F);
  batch = {.rows = 3, .hidden_states = hidden.data(), .softcap = 1.5F};
  ASSERT_TRUE(head->Logits(batch, {.logits = logits.data()}).ok());
  EXPECT_THAT(logits, Pointwise(FloatNear(1e-5F), expected));
  std::vector<uint16_t> narrow(3 * kVocab);
  ASSERT_TRUE(head->Logits(batch, {.type = DataType::kBFloat16, .logits = narrow.data()}).ok());
  for (size_t i = 0; i < narrow.size(); ++i) {
    const auto wide = std::bit_cast<float>(static_cast<uint32_t>(narrow[i]) << 16);
    EXPECT_NEAR(wide, logits[i], std::abs(logits[i]) / 256 + 1e-6);
  }
}

TEST_F(ClientServerLogitsTest, AreOfOneVersionThoughTheWeightsChangeMeanwhile) {
  StartWithWeights(WithCallsOf(4 * kVocab * 4));
  const auto write = [&](int value) {  // the same everywhere, so that all logits of a version are equal
    const std::vector<float> weights(kVocab * kHidden, static_cast<float>(value));
    EXPECT_TRUE(head_->WriteWeights(DataType::kFloat32, weights.data()).ok());
  };
  write(0);
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (int i = 1; !stop && i < 1000; ++i) {
      write(i);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  const std::vector<float> hidden(40 * kHidden, 1.0F);
  std::vector<float> logits;
  for (int read = 0; read < 20;) {
    if (!Read(*head_, hidden, &logits).ok()) continue;  // the writer was faster
    ++read;
    for (const float logit : logits) ASSERT_EQ(logit, logits[0]);
  }
  stop = true;
  writer.join();
  EXPECT_TRUE(Read(*head_, hidden, &logits).ok());
}

TEST_F(ClientServerLogitsTest, OfAnotherVersionThanDemandedFail) {
  StartWithWeights();
  const std::vector<float> hidden = RandomFloats(3 * kHidden, 2);
  std::vector<float> logits(3 * kVocab);
  const auto wrong = head_->Logits({.rows = 3, .hidden_states = hidden.data(), .weight_version = 2},
                                   {.logits = logits.data()});
  EXPECT_EQ(wrong.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("is 2; the weights are of version 1"));
  EXPECT_TRUE(head_
                  ->Logits({.rows = 3, .hidden_states = hidden.data(), .weight_version = 1},
                           {.logits = logits.data()})
                  .ok());
}

TEST_F(ClientServerLogitsTest, NoRowsAreFineAndTellTheVersion) {
  StartWithWeights();
  const auto version = head_->Logits({}, {});
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 1U);
}

// Generation beside training: nothing is counted twice or left out, and both go on.
TEST_F(ClientServerLogitsTest, ManyCallersDoNotDisturbATrainer) {
  StartWithWeights();
  std::vector<float> alone;
  {
    Session session = Open();
    Data data(200);
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
    alone = Flush();
  }
  std::atomic<bool> stop = false;
  std::vector<std::thread> callers;
  for (uint32_t i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      const std::vector<float> hidden = RandomFloats(9 * kHidden, i);
      const std::vector<float> expected = Expected(hidden, weights_);
      std::vector<float> logits;
      while (!stop) {
        const auto version = Read(*head_, hidden, &logits);
        ASSERT_TRUE(version.ok()) << version.status();
        ASSERT_THAT(logits, Pointwise(FloatNear(1e-5F), expected));
      }
    });
  }
  Session session = Open();
  for (int step = 0; step < 5; ++step) {
    Data data(200);
    const auto result = session.Compute(data.batch(), data.outputs());
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(Flush(), Pointwise(FloatNear(1e-5F), alone));
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_GE(calls(), 4U);
}

TEST_F(ClientServerLogitsTest, ArgumentsThatCannotBeAreRefusedBeforeAnythingIsSent) {
  StartWithWeights();
  const std::vector<float> hidden(3 * kHidden);
  std::vector<float> logits(3 * kVocab);
  const LogitsBatch good{.rows = 3, .hidden_states = hidden.data()};
  const auto refused = [&](const LogitsBatch& batch, const LogitsOutputs& outputs, const char* message) {
    const auto answer = head_->Logits(batch, outputs);
    EXPECT_EQ(answer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(answer.status().message()), HasSubstr(message));
  };
  refused({.rows = -1}, {.logits = logits.data()}, "rows is -1");
  refused({.rows = 3}, {.logits = logits.data()}, "hidden_states is null");
  refused(good, {}, "logits is null and top_k is 0");
  refused(good, {.logits = logits.data(), .top_k = 1}, "both set");
  refused(good, {.top_k = 62}, "top_k is 62; it must be in [0, 61]");
  std::vector<int32_t> tokens(5);
  refused(good, {.top_k = 2, .top_tokens = tokens}, "top_tokens has room for 5 values; it must have 6");
  refused(good, {.logits = logits.data(), .log_sum_exp = {logits.data(), 3}}, "log_sum_exp has room for 3");
  EXPECT_EQ(calls(), 0U);
}

TEST_F(ClientServerLogitsTest, OfHeadsWithoutWeightsOrThatAreGoneFail) {
  Start();
  const std::vector<float> hidden(kHidden);
  std::vector<float> logits;
  EXPECT_EQ(Read(*head_, hidden, &logits).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(client_->DeleteHead("head").ok());
  EXPECT_EQ(Read(*head_, hidden, &logits).status().code(), absl::StatusCode::kNotFound);
}

// More than fits is not refused but waits: each caller asks again when the server says.
TEST_F(ClientServerLogitsTest, CallersBeyondWhatAHeadHoldsWaitForTheirTurn) {
  StartWithWeights(WithCallsOf(4 * kVocab * 4));
  std::vector<std::thread> callers;
  std::atomic<int> right = 0;
  for (uint32_t i = 0; i < 24; ++i) {
    callers.emplace_back([&, i] {
      const std::vector<float> hidden = RandomFloats(12 * kHidden, i);
      std::vector<float> logits;
      const auto version = Read(*head_, hidden, &logits);
      EXPECT_TRUE(version.ok()) << version.status();
      right += version.ok() ? 1 : 0;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(right, 24);
}

}  // namespace
}  // namespace lossd::testing::logits_test
