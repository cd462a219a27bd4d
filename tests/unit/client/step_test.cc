// Head::ApplyStep against a server that loses answers, or that takes the arguments of every optimizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/client/session_fixture.h"

namespace lossd::testing::step_test {
namespace {

using ::testing::HasSubstr;

class ClientStepTest : public SessionTest {
 protected:
  // A batch is in the window; its marks.
  std::vector<SessionMarks> Fill(Session* session) {
    Data data(4);
    EXPECT_TRUE(session->Compute(data.batch(), data.outputs()).ok());
    return {session->marks()};
  }
};

TEST_F(ClientStepTest, NamesEverythingAndTellsEverything) {
  Session session = Open();
  const std::vector<SessionMarks> marks = Fill(&session);
  const auto step = head_->ApplyStep({.learning_rate = 0.25,
                                      .gradient_scale = 0.5,
                                      .skip_non_finite = true,
                                      .weight_decay = 0.0,
                                      .momentum = 0.1,
                                      .beta1 = 0.2,
                                      .beta2 = 0.3},
                                     marks);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->generation, 2U);
  EXPECT_EQ(step->weight_version, 2U);
  EXPECT_EQ(step->step, 1);
  EXPECT_FALSE(step->skipped);
  EXPECT_EQ(step->norm, 1.5);
  EXPECT_EQ(step->window_tokens, 5U);
  const v1::ApplyStepRequest request = fake_.observed().steps.at(0);
  EXPECT_EQ(request.generation(), 1U);
  EXPECT_EQ(request.head(), FakeServer::kName);
  EXPECT_EQ(request.learning_rate(), 0.25);
  EXPECT_EQ(request.gradient_scale(), 0.5);
  EXPECT_TRUE(request.skip_non_finite());
  EXPECT_TRUE(request.has_weight_decay());
  EXPECT_EQ(request.momentum(), 0.1);
  EXPECT_EQ(request.beta1(), 0.2);
  EXPECT_EQ(request.beta2(), 0.3);
  ASSERT_EQ(request.marks_size(), 1);
  EXPECT_EQ(request.marks(0).session_id(), session.id());
  EXPECT_EQ(request.marks(0).lanes(0).accepted(), 2U);
}

TEST_F(ClientStepTest, AnAnswerThatIsLostIsAskedForAgainAndTheStepIsTakenOnce) {
  fake_.lost_steps = 3;
  Session session = Open();
  const auto step = head_->ApplyStep({.learning_rate = 1}, Fill(&session));
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->step, 1);
  EXPECT_EQ(fake_.observed().steps.size(), 4U);
  EXPECT_EQ(fake_.generation(), 2U);
}

TEST_F(ClientStepTest, AStepThatIsLeftOpenIsTheOneThatTheNextCallIsAbout) {
  auto client = Client::Connect(fake_.target(), {.call_timeout = std::chrono::seconds(2),
                                                 .reconnect_timeout = std::chrono::seconds(20)});
  ASSERT_TRUE(client.ok()) << client.status();
  client_ = *std::move(client);
  head_ = std::make_unique<Head>(*client_->GetHead(FakeServer::kName));
  fake_.slow_steps = 1;
  Session session = Open();
  const std::vector<SessionMarks> marks = Fill(&session);
  EXPECT_EQ(head_->ApplyStep({.learning_rate = 1}, marks).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(fake_.generation(), 2U) << "it was taken all the same";
  const auto other = head_->ApplyStep({.learning_rate = 2}, marks);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition) << other.status();
  EXPECT_EQ(fake_.generation(), 2U) << "a step with other arguments is not another step";
}

TEST_F(ClientStepTest, AStepThatIsGivenUpByEndingTheWindowIsNotAskedForAgain) {
  auto client = Client::Connect(fake_.target(), {.call_timeout = std::chrono::seconds(2),
                                                 .reconnect_timeout = std::chrono::seconds(20)});
  ASSERT_TRUE(client.ok()) << client.status();
  client_ = *std::move(client);
  head_ = std::make_unique<Head>(*client_->GetHead(FakeServer::kName));
  fake_.slow_steps = 1;
  Session session = Open();
  ASSERT_FALSE(head_->ApplyStep({.learning_rate = 1}, Fill(&session)).ok());
  const auto discarded = head_->Discard({});
  ASSERT_TRUE(discarded.ok()) << discarded.status();
  const auto step = head_->ApplyStep({.learning_rate = 2}, Fill(&session));
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(fake_.observed().steps.back().generation(), discarded->generation + 1);
}

TEST_F(ClientStepTest, TheSameCallAfterATimeoutAnswersAsTheFirstWouldHave) {
  auto client = Client::Connect(fake_.target(), {.call_timeout = std::chrono::seconds(2),
                                                 .reconnect_timeout = std::chrono::seconds(20)});
  ASSERT_TRUE(client.ok()) << client.status();
  client_ = *std::move(client);
  head_ = std::make_unique<Head>(*client_->GetHead(FakeServer::kName));
  fake_.slow_steps = 1;
  Session session = Open();
  const std::vector<SessionMarks> marks = Fill(&session);
  EXPECT_FALSE(head_->ApplyStep({.learning_rate = 1}, marks).ok());
  const auto again = head_->ApplyStep({.learning_rate = 1}, marks);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->generation, 2U);
  EXPECT_EQ(again->step, 1);
  // And the one behind it is another one.
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 1}, Fill(&session)).ok());
  EXPECT_EQ(fake_.generation(), 3U);
}

TEST_F(ClientStepTest, AServerThatWasRestartedHasLostTheWindow) {
  Session session = Open();
  const std::vector<SessionMarks> first = Fill(&session);
  ASSERT_TRUE(head_->ApplyStep({.learning_rate = 1}, first).ok());
  const std::vector<SessionMarks> marks = Fill(&session);
  fake_.restart_before_steps = true;
  const auto step = head_->ApplyStep({.learning_rate = 1}, marks);
  EXPECT_TRUE(IsWindowLost(step.status())) << step.status();
  EXPECT_THAT(std::string(step.status().message()), HasSubstr("generation 2"));
}

}  // namespace
}  // namespace lossd::testing::step_test
