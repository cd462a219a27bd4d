// Replicas of a head end a window together: all of them have the weights of one server that was given all
// batches, or none has changed.
#include "server/engine/replicas/window_ending.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/unit/engine/replicas/replica_servers.h"

namespace lossd::engine::testing {
namespace {

using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

StepRequest Rate(double learning_rate) { return {.learning_rate = learning_rate}; }

class WindowEndingTest : public ::testing::TestWithParam<SetSize> {
 protected:
  int32_t replicas() const { return GetParam().replicas; }
};

TEST_P(WindowEndingTest, AllHaveTheWeightsOfOneServerWithAllBatches) {
  ReplicaServers servers(GetParam(), ReplicaServers::AdamWHead());
  ReplicaServers one(1, ReplicaServers::AdamWHead());
  for (uint64_t generation = 1; generation <= 3; ++generation) {
    uint64_t tokens = 0;
    for (int32_t replica = 0; replica < replicas(); ++replica) {
      const uint64_t seed = 100 * generation + static_cast<uint64_t>(replica);
      const int64_t count = 3 + replica;
      servers.at(replica).Compute(seed, count, generation);
      one.at(0).Compute(seed, count, generation);
      tokens += static_cast<uint64_t>(count);
    }
    const absl::StatusOr<StepResult> together = servers.Step(generation, Rate(1e-2));
    const absl::StatusOr<StepResult> alone = one.Step(generation, Rate(1e-2));
    ASSERT_TRUE(together.ok()) << together.status();
    EXPECT_EQ(together->generation, generation + 1);
    EXPECT_EQ(together->window_tokens, tokens);
    EXPECT_EQ(together->weight_version, alone->weight_version);
    EXPECT_EQ(together->step, static_cast<int64_t>(generation));
    EXPECT_NEAR(together->stats.norm, alone->stats.norm, 1e-6 * alone->stats.norm);
    const std::vector<float> weights = servers.at(0).Weights();
    EXPECT_THAT(weights, Pointwise(FloatNear(1e-5F), one.at(0).Weights()));
    for (int32_t replica = 1; replica < replicas(); ++replica) {
      EXPECT_EQ(servers.at(replica).Weights(), weights) << "at replica " << replica;
      EXPECT_EQ(servers.at(replica).head()->Info().generation, generation + 1);
    }
  }
}

TEST_P(WindowEndingTest, MarksThatOneReplicaRefusesChangeNothingAnywhere) {
  ReplicaServers servers(GetParam(), ReplicaServers::AdamWHead());
  for (int32_t replica = 0; replica < replicas(); ++replica) servers.at(replica).Compute(7, 3);
  const std::vector<SessionMarks> before = servers.Marks();
  const std::vector<float> weights = servers.at(0).Weights();
  servers.at(replicas() - 1).Compute(8, 3);
  const absl::StatusOr<StepResult> refused = servers.Step(1, before, Rate(1e-2));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_THAT(refused.status().message(), HasSubstr(before.back().session_id));
  for (int32_t replica = 0; replica < replicas(); ++replica) {
    EXPECT_EQ(servers.at(replica).Weights(), weights);
    EXPECT_EQ(servers.at(replica).head()->Info().generation, 1U);
    servers.at(replica).Compute(9, 2);  // they take chunks again
  }
  EXPECT_TRUE(servers.Step(1, Rate(1e-2)).ok());
}

TEST_P(WindowEndingTest, AWindowWithoutATokenIsEndedAndNothingStepped) {
  ReplicaServers servers(GetParam(), ReplicaServers::AdamWHead());
  const std::vector<float> weights = servers.at(0).Weights();
  const absl::StatusOr<StepResult> step = servers.Step(1, Rate(1e-2));
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_TRUE(step->skipped);
  EXPECT_EQ(step->generation, 2U);
  EXPECT_EQ(step->step, 0);
  for (int32_t replica = 0; replica < replicas(); ++replica) {
    EXPECT_EQ(servers.at(replica).Weights(), weights);
    EXPECT_EQ(servers.at(replica).head()->Info().generation, 2U);
  }
}

TEST_P(WindowEndingTest, OneReplicaMayHaveNothing) {
  ReplicaServers servers(GetParam(), ReplicaServers::AdamWHead());
  ReplicaServers one(1, ReplicaServers::AdamWHead());
  servers.at(replicas() - 1).Compute(7, 5);
  one.at(0).Compute(7, 5);
  ASSERT_TRUE(servers.Step(1, Rate(1e-2)).ok());
  ASSERT_TRUE(one.Step(1, Rate(1e-2)).ok());
  for (int32_t replica = 0; replica < replicas(); ++replica) {
    EXPECT_EQ(servers.at(replica).Weights(), one.at(0).Weights()) << "there is one gradient to add up";
  }
}

TEST_P(WindowEndingTest, AStepThatIsAskedForAgainIsAnsweredAlike) {
  ReplicaServers servers(GetParam(), ReplicaServers::AdamWHead());
  for (int32_t replica = 0; replica < replicas(); ++replica) servers.at(replica).Compute(7, 3);
  const std::vector<SessionMarks> marks = servers.Marks();
  const absl::StatusOr<StepResult> first = servers.Step(1, marks, Rate(1e-2));
  const std::vector<float> weights = servers.at(0).Weights();
  const absl::StatusOr<StepResult> again = servers.Step(1, marks, Rate(1e-2));
  ASSERT_TRUE(first.ok() && again.ok()) << first.status() << again.status();
  EXPECT_EQ(first->weight_version, again->weight_version);
  EXPECT_EQ(servers.at(0).Weights(), weights);
  EXPECT_FALSE(servers.Step(1, marks, Rate(2e-2)).ok()) << "with other arguments";
}

// As at one server: StepTest.TheSameAgainWithMarksThatLossesAloneHaveMovedIsTheSameStep.
TEST_P(WindowEndingTest, AStepIsKnownAgainByMarksThatLossesAloneHaveMovedAtAnyReplica) {
  ReplicaServers servers(GetParam(), ReplicaServers::AdamWHead());
  for (int32_t replica = 0; replica < replicas(); ++replica) servers.at(replica).Compute(7, 3);
  const std::vector<SessionMarks> marks = servers.Marks();
  ASSERT_TRUE(servers.Step(1, marks, Rate(1e-2)).ok());  // and the answer is lost
  const std::vector<float> weights = servers.at(0).Weights();
  for (int32_t replica = 0; replica < replicas(); ++replica) {
    servers.at(replica).ComputeLosses(8, 2, 2);
    const std::vector<SessionMarks> moved = servers.Marks();
    ASSERT_EQ(moved.size(), 1U) << "the others are where the step has left them";
    std::vector<SessionMarks> now = marks;
    now[static_cast<size_t>(replica)] = moved[0];
    const absl::StatusOr<StepResult> again = servers.Step(1, now, Rate(1e-2));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->generation, 2U);
    EXPECT_EQ(again->window_tokens, 3U * static_cast<uint64_t>(replicas()));
    EXPECT_TRUE(servers.Marks().empty()) << "what it names is behind its caller";
    EXPECT_TRUE(servers.Step(1, marks, Rate(1e-2)).ok()) << "and so are those of before";
    EXPECT_EQ(servers.Step(1, now, Rate(2e-2)).status().code(), absl::StatusCode::kFailedPrecondition);
  }
  EXPECT_EQ(servers.at(0).Weights(), weights);
}

TEST_P(WindowEndingTest, AStepWithOtherMarksOfAnyReplicaIsAnotherOne) {
  ReplicaServers servers(GetParam(), ReplicaServers::AdamWHead());
  for (int32_t replica = 0; replica < replicas(); ++replica) servers.at(replica).Compute(7, 3);
  const std::vector<SessionMarks> marks = servers.Marks();
  ASSERT_TRUE(servers.Step(1, marks, Rate(1e-2)).ok());
  const auto refusal = [&](const std::vector<SessionMarks>& named) {
    return servers.Step(1, named, Rate(1e-2)).status().code();
  };
  for (size_t replica = 0; replica < marks.size(); ++replica) {
    std::vector<SessionMarks> wrong = marks;
    wrong[replica].lanes[0].accepted = 7;
    EXPECT_EQ(refusal(wrong), absl::StatusCode::kFailedPrecondition) << "nobody has come to that";
    wrong = marks;
    wrong.erase(wrong.begin() + static_cast<std::ptrdiff_t>(replica));
    EXPECT_EQ(refusal(wrong), absl::StatusCode::kFailedPrecondition) << "one is missing";
    wrong = marks;
    wrong[replica].past = {.incarnation = "another server", .restores = 0};
    EXPECT_EQ(refusal(wrong), absl::StatusCode::kAborted) << "the same numbers stand for something else";
  }
  for (int32_t replica = 0; replica < replicas(); ++replica) {
    servers.at(replica).Compute(8, 2, 2);
    std::vector<SessionMarks> moved = marks;
    moved[static_cast<size_t>(replica)].lanes[0].accepted = 2;
    EXPECT_EQ(refusal(moved), absl::StatusCode::kFailedPrecondition) << "gradients have moved them";
  }
  const absl::StatusOr<StepResult> next = servers.Step(2, Rate(1e-2));
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->step, 2);
}

TEST_P(WindowEndingTest, ANonFiniteGradientOfOneReplicaIsSkippedByAll) {
  ReplicaServers servers(GetParam(), ReplicaServers::AdamWHead());
  for (int32_t replica = 0; replica < replicas(); ++replica) servers.at(replica).Compute(7, 3);
  const std::vector<float> weights = servers.at(0).Weights();
  StepRequest request = Rate(1e-2);
  request.non_finite = NonFinite::kSkip;
  request.gradient_scale = 3e38;
  const absl::StatusOr<StepResult> step = servers.Step(1, request);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_TRUE(step->skipped);
  EXPECT_GT(step->stats.non_finite, 0);
  for (int32_t replica = 0; replica < replicas(); ++replica) {
    EXPECT_EQ(servers.at(replica).Weights(), weights);
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, WindowEndingTest,
                         ::testing::Values(SetSize{2}, SetSize{3}, SetSize{2, 2}, SetSize{3, 2}));

// Chunks of such heads have the same bits on any number of ranks, and sums are made in the order of replicas.
TEST(GroupsTest, ReplicasOfTwoRanksHaveTheBitsOfThoseOfOne) {
  HeadConfig config = ReplicaServers::AdamWHead();
  config.fixed_segments = true;
  for (const int32_t replicas : {2, 3}) {
    ReplicaServers groups(SetSize{replicas, 2}, config);
    ReplicaServers alone(SetSize{replicas}, config);
    for (uint64_t generation = 1; generation <= 3; ++generation) {
      for (ReplicaServers* const servers : {&groups, &alone}) {
        for (int32_t replica = 0; replica < replicas; ++replica) {
          servers->at(replica).Compute(100 * generation + static_cast<uint64_t>(replica), 5, generation);
        }
        ASSERT_TRUE(servers->Step(generation, Rate(1e-2)).ok());
      }
      for (int32_t replica = 0; replica < replicas; ++replica) {
        EXPECT_EQ(groups.at(replica).Weights(), alone.at(replica).Weights()) << "at replica " << replica;
      }
    }
  }
}

TEST(CoordinatorTest, WindowsAreEndedByReplicaZeroAlone) {
  ReplicaServers servers(2, ReplicaServers::AdamWHead());
  absl::Status refused;
  servers.at(1).head()->ApplyStep(1, {}, Rate(1e-2),
                                  [&](const absl::StatusOr<StepResult>& step) { refused = step.status(); });
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(), HasSubstr("replica 0"));
}

}  // namespace
}  // namespace lossd::engine::testing
