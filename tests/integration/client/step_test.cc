// Head::ApplyStep and Head::GradientStats, also where answers are lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "tests/support/real_server.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"

namespace lossd::testing::step_test {
namespace {

using ::testing::HasSubstr;

class ClientStepTest : public SessionTest {
 protected:
  ClientStepTest() { server_.config.optimizer.kind = OptimizerKind::kSgd; }

  // A batch is in the window; its marks.
  std::vector<SessionMarks> Fill(Session* session) {
    Data data(4);
    EXPECT_TRUE(session->Compute(data.batch(), data.outputs()).ok());
    return {session->marks()};
  }
  // The answer to the next step does not come in time.
  void LeaveAStepOpen() {
    Connect({.call_timeout = std::chrono::seconds(2), .reconnect_timeout = std::chrono::seconds(20)});
    server_.recorder().LoseAnswers("ApplyStep", 1, {grpc::StatusCode::DEADLINE_EXCEEDED, ""});
  }
};

TEST_F(ClientStepTest, WhatIsUnsetIsNotSent) {
  Session session = Open();
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 1}, Fill(&session)).ok());
  const v1::ApplyStepRequest request = server_.observed().steps.at(0);
  EXPECT_FALSE(request.has_gradient_scale());
  EXPECT_FALSE(request.has_weight_decay());
  EXPECT_FALSE(request.has_momentum());
  EXPECT_FALSE(request.has_beta1());
  EXPECT_FALSE(request.has_beta2());
}

TEST_F(ClientStepTest, SessionsGoOnInTheNextWindowWithoutBeingRefused) {
  Session session = Open();
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 1}, Fill(&session)).ok());
  Data next(4, 3);
  const auto result = session.Compute(next.batch(), next.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->weight_version, 2U);
  EXPECT_EQ(server_.observed().chunks.back().generation(), 2U);
  EXPECT_EQ(server_.observed().streams, 1);
  EXPECT_EQ(server_.window(), next.Window());
}

TEST_F(ClientStepTest, AGenerationThatIsNamedIsTheOneThatIsAskedFor) {
  Session session = Open();
  const std::vector<SessionMarks> marks = Fill(&session);
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 1, .generation = 1}, marks).ok());
  const auto again = head_->ApplyStep({.learning_rate = 1, .generation = 1}, marks);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->step, 1);
  EXPECT_EQ(head_->ApplyStep({.learning_rate = 1, .generation = 7}, marks).status().code(),
            absl::StatusCode::kAborted);
}

TEST_F(ClientStepTest, StatsAreOfTheOpenWindow) {
  Session session = Open();
  const std::vector<SessionMarks> marks = Fill(&session);
  const auto stats = head_->GradientStats(marks, 0.5);
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->norm, 1.5);
  EXPECT_EQ(stats->bias_norm, 2.5);
  EXPECT_EQ(stats->largest, 3.5F);
  EXPECT_EQ(stats->non_finite, 4);
  EXPECT_EQ(stats->window_tokens, 4U);
  const v1::GradientStatsRequest request = server_.observed().stats.at(0);
  EXPECT_EQ(request.generation(), 1U);
  EXPECT_EQ(request.gradient_scale(), 0.5);
  EXPECT_EQ(request.marks(0).session_id(), session.id());
}

TEST_F(ClientStepTest, NamesEverythingAndTellsEverything) {
  server_.config.optimizer.momentum = 0.9;
  Session session = Open();
  const std::vector<SessionMarks> marks = Fill(&session);
  const auto step = head_->ApplyStep({.learning_rate = 0.25,
                                      .gradient_scale = 0.5,
                                      .skip_non_finite = true,
                                      .weight_decay = 0.0,
                                      .momentum = 0.1},
                                     marks);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->generation, 2U);
  EXPECT_EQ(step->weight_version, 1U);
  EXPECT_EQ(step->step, 0);
  EXPECT_TRUE(step->skipped) << "the device has always seen values that are not finite";
  EXPECT_EQ(step->norm, 1.5);
  EXPECT_EQ(step->window_tokens, 4U);
  const v1::ApplyStepRequest request = server_.observed().steps.at(0);
  EXPECT_EQ(request.generation(), 1U);
  EXPECT_EQ(request.head(), kHeadName);
  EXPECT_EQ(request.learning_rate(), 0.25);
  EXPECT_EQ(request.gradient_scale(), 0.5);
  EXPECT_TRUE(request.skip_non_finite());
  EXPECT_TRUE(request.has_weight_decay());
  EXPECT_EQ(request.momentum(), 0.1);
  ASSERT_EQ(request.marks_size(), 1);
  EXPECT_EQ(request.marks(0).session_id(), session.id());
  EXPECT_EQ(request.marks(0).lanes(0).accepted(), 2U);
}

TEST_F(ClientStepTest, AnAnswerThatIsLostIsAskedForAgainAndTheStepIsTakenOnce) {
  server_.recorder().LoseAnswers("ApplyStep", 3);
  Session session = Open();
  const auto step = head_->ApplyStep({.learning_rate = 1}, Fill(&session));
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->step, 1);
  EXPECT_EQ(server_.observed().steps.size(), 4U);
  EXPECT_EQ(server_.generation(), 2U);
}

TEST_F(ClientStepTest, AStepThatIsLeftOpenIsTheOneThatTheNextCallIsAbout) {
  LeaveAStepOpen();
  Session session = Open();
  const std::vector<SessionMarks> marks = Fill(&session);
  EXPECT_EQ(head_->ApplyStep({.learning_rate = 1}, marks).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(server_.generation(), 2U) << "it was taken all the same";
  const auto other = head_->ApplyStep({.learning_rate = 2}, marks);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition) << other.status();
  EXPECT_EQ(server_.generation(), 2U) << "a step with other arguments is not another step";
}

TEST_F(ClientStepTest, AStepThatIsGivenUpByEndingTheWindowIsNotAskedForAgain) {
  LeaveAStepOpen();
  Session session = Open();
  ASSERT_FALSE(head_->ApplyStep({.learning_rate = 1}, Fill(&session)).ok());
  const auto discarded = head_->Discard({});
  ASSERT_TRUE(discarded.ok()) << discarded.status();
  const auto step = head_->ApplyStep({.learning_rate = 2}, Fill(&session));
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(server_.observed().steps.back().generation(), discarded->generation + 1);
}

TEST_F(ClientStepTest, TheSameCallAfterATimeoutAnswersAsTheFirstWouldHave) {
  LeaveAStepOpen();
  Session session = Open();
  const std::vector<SessionMarks> marks = Fill(&session);
  EXPECT_FALSE(head_->ApplyStep({.learning_rate = 1}, marks).ok());
  const auto again = head_->ApplyStep({.learning_rate = 1}, marks);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->generation, 2U);
  EXPECT_EQ(again->step, 1);
  // And the one behind it is another one.
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 1}, Fill(&session)).ok());
  EXPECT_EQ(server_.generation(), 3U);
}

class RestartedStepTest : public ClientStepTest, public ::testing::WithParamInterface<RealServer::With> {};

TEST_P(RestartedStepTest, AServerThatWasRestartedHasLostTheWindow) {
  Session session = Open();
  const std::vector<SessionMarks> first = Fill(&session);
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 1}, first).ok());
  const std::vector<SessionMarks> marks = Fill(&session);
  server_.recorder().before_call = [this](const std::string& method, int number) {
    if (method == "ApplyStep" && number == 2) server_.Restart(GetParam());
  };
  const auto step = head_->ApplyStep({.learning_rate = 1}, marks);
  EXPECT_TRUE(IsWindowLost(step.status())) << step.status();
  const bool has_head = GetParam() == RealServer::With::kSameHead;  // whose generation is 1
  EXPECT_THAT(std::string(step.status().message()), HasSubstr(has_head ? "generation 1" : "generation 2"));
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutHead, RestartedStepTest,
                         ::testing::Values(RealServer::With::kSameHead, RealServer::With::kNoHead));

// Every optimizer's arguments go out; which of them it takes the server says.
TEST_F(ClientStepTest, TheArgumentsOfAdamAreNamedToo) {
  server_.config.optimizer.kind = OptimizerKind::kAdam;
  Session session = Open();
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 1, .beta1 = 0.2, .beta2 = 0.3}, Fill(&session)).ok());
  const v1::ApplyStepRequest request = server_.observed().steps.at(0);
  EXPECT_EQ(request.beta1(), 0.2);
  EXPECT_EQ(request.beta2(), 0.3);
}

}  // namespace
}  // namespace lossd::testing::step_test
