// Steps of the server's optimizer, and heads with two gradients, through the client library.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <thread>

#include "tests/integration/client_server/client_server_fixture.h"
#include "tests/support/wait.h"

namespace lossd::testing::step_test {
namespace {

using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

class ClientServerStepTest : public ClientServerTest {
 protected:
  // Another head of the same weights.
  Head Make(HeadConfig config) {
    config.vocab_size = kVocab;
    config.hidden_size = kHidden;
    config.weight_type = DataType::kFloat32;
    auto head = client_->CreateHead(config);
    EXPECT_TRUE(head.ok()) << head.status();
    EXPECT_TRUE(head->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data()).ok());
    return *std::move(head);
  }
  static std::vector<float> WeightsOf(const Head& head) {
    std::vector<float> weights(kVocab * kHidden);
    EXPECT_TRUE(head.ReadWeights(DataType::kFloat32, weights.data()).ok());
    return weights;
  }
  static SessionMarks Add(Session& session, int64_t tokens, uint32_t seed) {
    Data data(tokens, seed);
    const auto result = session.Compute(data.batch(), data.outputs());
    EXPECT_TRUE(result.ok()) << result.status();
    return session.marks();
  }
  // dW of this batch alone.
  std::vector<float> GradientOf(int64_t tokens, uint32_t seed) {
    Session session = Open();
    Add(session, tokens, seed);
    return Flush();
  }
};

TEST_F(ClientServerStepTest, AStepIsWhatAFlushAndTheTrainersOwnStepWouldBe) {
  StartWithWeights();
  const std::vector<float> gradient = GradientOf(50, 3);
  const Head head = Make({.name = "stepped", .optimizer = {.kind = OptimizerKind::kSgd}});
  Session session = *head.OpenSession({});
  const SessionMarks marks = Add(session, 50, 3);
  double squares = 0;
  for (const float value : gradient) squares += static_cast<double>(value) * value;

  const auto stats = head.GradientStats({&marks, 1});
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_NEAR(stats->norm, std::sqrt(squares), 1e-5 * std::sqrt(squares));
  EXPECT_EQ(stats->non_finite, 0);
  EXPECT_EQ(stats->window_tokens, 50U);
  // A norm of 1 at most, as a trainer would have it together with its other parameters.
  const double clip = std::min(1.0, 1 / stats->norm);
  const auto step = head.ApplyStep({.learning_rate = 0.5, .gradient_scale = clip}, {&marks, 1});
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_NEAR(step->norm, 1, 1e-5);
  EXPECT_EQ(step->generation, 2U);
  EXPECT_EQ(step->weight_version, 2U);
  EXPECT_EQ(step->window_tokens, 50U);
  std::vector<float> expected = RandomFloats(kVocab * kHidden, 1);
  for (size_t i = 0; i < expected.size(); ++i) {
    expected[i] -= static_cast<float>(0.5 * clip) * gradient[i];
  }
  EXPECT_THAT(WeightsOf(head), Pointwise(FloatNear(1e-6F), expected));
  EXPECT_EQ(head.Info()->optimizer_steps, 1);

  // The next batch meets the new weights and is alone in its window.
  Data next(20, 9);
  const auto result = session.Compute(next.batch(), next.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->weight_version, 2U);
  server_->engine().WaitIdle();
  EXPECT_EQ(head.Info()->window_tokens, 20U);
  EXPECT_EQ(session.reconnects(), 0);
}

TEST_F(ClientServerStepTest, TheSameGenerationAgainIsNoSecondStep) {
  StartWithWeights();
  const Head head = Make({.name = "stepped", .optimizer = {.kind = OptimizerKind::kAdamW}});
  Session session = *head.OpenSession({});
  const SessionMarks marks = Add(session, 30, 3);
  const StepOptions options{.learning_rate = 0.01, .generation = 1};
  const auto first = head.ApplyStep(options, {&marks, 1});
  ASSERT_TRUE(first.ok()) << first.status();
  const std::vector<float> weights = WeightsOf(head);
  const auto again = head.ApplyStep(options, {&marks, 1});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->norm, first->norm);
  EXPECT_EQ(again->weight_version, first->weight_version);
  EXPECT_EQ(WeightsOf(head), weights);
  const auto other = head.ApplyStep({.learning_rate = 0.02, .generation = 1}, {&marks, 1});
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("learning_rate 0.01; this call names 0.02"));
  EXPECT_EQ(WeightsOf(head), weights);
}

TEST_F(ClientServerStepTest, StepsOfDeterministicSessionsHaveTheSameBitsHoweverChunksAreCut) {
  StartWithWeights();
  std::vector<std::vector<float>> weights;
  for (const int64_t chunk_tokens : {3, 16}) {
    const Head head =
        Make({.name = "d" + std::to_string(chunk_tokens), .optimizer = {.kind = OptimizerKind::kAdamW}});
    auto session =
        head.OpenSession({.chunk_bytes = chunk_tokens * kHidden * static_cast<int64_t>(sizeof(float)),
                          .lanes = 2,
                          .deterministic = Deterministic::kYes});
    ASSERT_TRUE(session.ok()) << session.status();
    for (uint32_t step = 0; step < 3; ++step) {
      const SessionMarks marks = Add(*session, 100, step);
      const auto stepped = head.ApplyStep({.learning_rate = 0.01}, {&marks, 1});
      ASSERT_TRUE(stepped.ok()) << stepped.status();
    }
    weights.push_back(WeightsOf(head));
  }
  EXPECT_EQ(weights[0], weights[1]);
}

TEST_F(ClientServerStepTest, ADrainingServerTakesNoFlushAndNoStepAndLosesNothing) {
  StartWithWeights();
  Stubs stubs(server_->Channel());
  Session session = Open();
  Add(session, 10, 3);
  server_->engine().BeginDrain();
  server_->engine().WaitIdle();
  v1::BeginFlushResponse flush;
  EXPECT_EQ(BeginFlush(stubs, "head", &flush).error_code(), grpc::StatusCode::UNAVAILABLE);
  const v1::Head head = GetHead(stubs, "head");
  EXPECT_EQ(head.window_state(), v1::WINDOW_STATE_OPEN);
  EXPECT_EQ(head.window_tokens(), 10U);
}

// Two gradients

TEST_F(ClientServerStepTest, ATrainerGoesOnWhileItsWindowIsRead) {
  StartWithWeights();
  std::vector<std::vector<float>> expected;
  for (uint32_t window = 0; window < 4; ++window) expected.push_back(GradientOf(40, 10 + window));

  const Head head = Make({.name = "two", .double_buffer = true});
  Session session = *head.OpenSession({});
  SessionMarks marks = Add(session, 40, 10);
  for (uint32_t window = 0; window < 4; ++window) {
    std::vector<float> gradient(kVocab * kHidden);
    std::promise<void> frozen;
    std::thread flush([&] {
      FlushOptions options;
      options.on_frozen = [&frozen] { frozen.set_value(); };
      const auto flushed = head.Flush(options, {&marks, 1}, gradient.data());
      EXPECT_TRUE(flushed.ok()) << flushed.status();
      EXPECT_EQ(flushed->generation, window + 1);
      EXPECT_EQ(flushed->window_tokens, 40U);
    });
    Await("the window to be frozen", frozen);
    SessionMarks next;
    if (window < 3) next = Add(session, 40, 11 + window);
    flush.join();
    EXPECT_THAT(gradient, Pointwise(FloatNear(1e-5F), expected[window])) << window;
    marks = next;
  }
  EXPECT_EQ(session.reconnects(), 0);
  EXPECT_EQ(head.Info()->generation, 5U);
}

// What travels is what there is to send, and nothing of the weights' shape.
TEST_F(ClientServerStepTest, TrafficCountsMessagesAndAStepMovesNoTensor) {
  StartWithWeights();
  const Head head = Make({.name = "stepped", .optimizer = {.kind = OptimizerKind::kSgd}});
  Session session = *head.OpenSession({});
  const Traffic before = client_->TrafficSoFar();
  const SessionMarks marks = Add(session, 50, 3);
  const Traffic computed = client_->TrafficSoFar();
  constexpr int64_t kStates = 50 * kHidden * 4;
  EXPECT_GE(computed.bytes_sent - before.bytes_sent, kStates + 50 * 8);
  EXPECT_LT(computed.bytes_sent - before.bytes_sent, kStates + 50 * 8 + 500);
  EXPECT_GE(computed.bytes_received - before.bytes_received, kStates + 50 * 4);
  EXPECT_LT(computed.bytes_received - before.bytes_received, kStates + 50 * 4 + 1000);
  ASSERT_TRUE(head.ApplyStep({.learning_rate = 0.5}, {&marks, 1}).ok());
  const Traffic stepped = client_->TrafficSoFar();
  EXPECT_GT(stepped.bytes_sent, computed.bytes_sent);
  EXPECT_LT(stepped.bytes_sent - computed.bytes_sent, 1000);
  EXPECT_LT(stepped.bytes_received - computed.bytes_received, 2000);
}

}  // namespace
}  // namespace lossd::testing::step_test
