// Head::ApplyStep and Head::GradientStats.
#include <gtest/gtest.h>

#include "tests/integration/client/session_fixture.h"
#include "tests/unit/client/session_data.h"

namespace lossd::testing::step_test {
namespace {

class ClientStepTest : public SessionTest {
 protected:
  ClientStepTest() { server_.config.optimizer.kind = OptimizerKind::kSgd; }

  // A batch is in the window; its marks.
  std::vector<SessionMarks> Fill(Session* session) {
    Data data(4);
    EXPECT_TRUE(session->Compute(data.batch(), data.outputs()).ok());
    return {session->marks()};
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

}  // namespace
}  // namespace lossd::testing::step_test
