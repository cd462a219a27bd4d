// Replicas that meet over their control, lose each other, and meet again: whatever happens in between,
// windows end at all of them or at none, and every batch counts once.
#include "server/rpc/replicas/replica_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/rpc/group/group_member.h"
#include "tests/unit/engine/replicas/replica_servers.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::replica_set_test {
namespace {

using engine::StepRequest;
using engine::StepResult;
using engine::testing::SetSize;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

absl::StatusOr<std::string> Read(engine::ReplicaPart& part, const engine::PartRows& rows) {
  std::promise<absl::StatusOr<std::string>> read;
  part.ReadRows(rows, [&](absl::StatusOr<std::string> bytes) { read.set_value(std::move(bytes)); });
  return read.get_future().get();
}

absl::Status Write(engine::ReplicaPart& part, const engine::PartRows& rows, const std::string& bytes) {
  std::promise<absl::Status> written;
  part.WriteRows(rows, bytes, [&](const absl::Status& status) { written.set_value(status); });
  return written.get_future().get();
}

constexpr StepRequest kStep = {.learning_rate = 1e-2};

class ReplicaSetTest : public ::testing::TestWithParam<SetSize> {};

// One batch at each replica, and all of them at `one`.
void ComputeEverywhere(int32_t replicas, uint64_t generation, ReplicaServers& servers, ReplicaServers& one) {
  for (int32_t replica = 0; replica < replicas; ++replica) {
    const uint64_t seed = 100 * generation + static_cast<uint64_t>(replica);
    servers.at(replica).Compute(seed, 3 + replica, generation);
    one.at(0).Compute(seed, 3 + replica, generation);
  }
}

TEST_P(ReplicaSetTest, ThoseThatHaveMetStepTogether) {
  SetUnderTest set(GetParam());
  ReplicaServers one(1, ReplicaServers::AdamWHead());
  set.MeetAll();
  for (uint64_t generation = 1; generation <= 3; ++generation) {
    ComputeEverywhere(GetParam().replicas, generation, set.servers(), one);
    const absl::StatusOr<StepResult> together = set.servers().Step(generation, kStep);
    ASSERT_TRUE(together.ok()) << together.status();
    ASSERT_TRUE(one.Step(generation, kStep).ok());
    EXPECT_EQ(together->generation, generation + 1);
    const std::vector<float> weights = set.servers().at(0).Weights();
    EXPECT_THAT(weights, Pointwise(FloatNear(1e-5F), one.at(0).Weights()));
    for (int32_t replica = 1; replica < GetParam().replicas; ++replica) {
      EXPECT_EQ(set.servers().at(replica).Weights(), weights) << "at replica " << replica;
    }
  }
}

TEST(WaitingReplicaSetTest, WhoHasJoinedAndSaysNothingMoreIsNamed) {
  // With a plan: the set has less patience.
  SetUnderTest set({2}, ReplicaServers::AdamWHead(),
                   [](int /*connection*/) { return std::vector<lossd::testing::Fault>(); });
  set.Meet(0);
  GroupMemberOptions options;
  options.address = "127.0.0.1:" + std::to_string(set.proxy().port());
  options.credentials.token = SetUnderTest::kToken;
  options.identity = set.Identity();
  options.rank_timeout = absl::Seconds(1);
  const absl::StatusOr<std::unique_ptr<GroupMember>> silent = GroupMember::Join(options);
  ASSERT_TRUE(silent.ok()) << silent.status();
  const auto told = [&set] { return std::string(set.set(0).Whole().message()); };
  while (told().find("has joined") == std::string::npos) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_THAT(told(),
              ::testing::MatchesRegex("replica 1 has joined, but has not said what there is for [0-9]+ s"));
  EXPECT_EQ(told(), set.servers().at(0).engine().replicas().Read().WhyNot());
}

TEST_P(ReplicaSetTest, AStepIsKnownAgainThoughLossesAloneHaveMovedMarksEverywhere) {
  SetUnderTest set(GetParam());
  ReplicaServers one(1, ReplicaServers::AdamWHead());
  set.MeetAll();
  ComputeEverywhere(GetParam().replicas, 1, set.servers(), one);
  const absl::StatusOr<StepResult> first = set.servers().Step(1, kStep);
  ASSERT_TRUE(first.ok()) << first.status();
  for (int32_t replica = 0; replica < GetParam().replicas; ++replica) {
    set.servers().at(replica).ComputeLosses(9, 2, 2);
  }
  const std::vector<engine::SessionMarks> moved = set.servers().Marks();
  const absl::StatusOr<StepResult> again = set.servers().Step(1, moved, kStep);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->weight_version, first->weight_version);
  EXPECT_EQ(again->stats.norm, first->stats.norm);
  EXPECT_TRUE(set.servers().Marks().empty()) << "what it names is behind its caller";
}

// So many of each phase were timed at every replica, and by the coordinator of every replica.
void ExpectRounds(ReplicaServers& servers, int32_t replicas, const engine::EachPhase<uint64_t>& rounds) {
  const auto count = [](const auto& histogram) {
    uint64_t all = 0;
    for (size_t i = 0; i <= engine::kDurationBounds.size(); ++i) all += histogram.bucket(i);
    return all;
  };
  const engine::ReplicaReport first = servers.at(0).engine().replicas().Read();
  ASSERT_EQ(first.replicas.size(), static_cast<size_t>(replicas));
  for (size_t phase = 0; phase < rounds.size(); ++phase) {
    for (int32_t replica = 0; replica < replicas; ++replica) {
      const engine::ReplicaReport own = servers.at(replica).engine().replicas().Read();
      EXPECT_EQ(count(own.phases[phase]), rounds[phase]) << "phase " << phase << " of replica " << replica;
      EXPECT_EQ(count(first.replicas[static_cast<size_t>(replica)].late[phase]), rounds[phase])
          << "phase " << phase << " of replica " << replica << ", by the coordinator";
    }
  }
}

TEST_P(ReplicaSetTest, EachPhaseIsTimedAtEachReplica) {
  SetUnderTest set(GetParam());
  const int32_t replicas = GetParam().replicas;
  set.MeetAll();
  ASSERT_TRUE(set.servers().Step(1, kStep).ok());
  ExpectRounds(set.servers(), replicas, {1, 1, 1, 0});
}

TEST(ReplicaSet, EachRoundOfAFlushIsTimed) {
  SetUnderTest set(3);
  set.MeetAll();
  const absl::StatusOr<engine::FlushInfo> flush = set.servers().Flush(1);
  ASSERT_TRUE(flush.ok()) << flush.status();
  ASSERT_TRUE(set.servers().Commit(flush->flush_id).ok());
  // The flush is held, and ended.
  ExpectRounds(set.servers(), 3, {1, 1, 0, 2});
}

TEST(ReplicaSet, TellsHowOftenAllHaveMetAndHowOftenTheyWentBack) {
  SetUnderTest set(2);
  set.MeetAll();
  const uint64_t history = set.servers().at(0).engine().replicas().Read().history;
  set.Replace(1);
  set.AwaitWhole();
  const engine::ReplicaReport first = set.servers().at(0).engine().replicas().Read();
  const engine::ReplicaReport second = set.servers().at(1).engine().replicas().Read();
  EXPECT_EQ(first.epochs, 2U);
  EXPECT_EQ(second.epochs, 1U) << "it is another process";
  EXPECT_EQ(first.returns, 1U);
  EXPECT_EQ(second.returns, 1U);
  EXPECT_EQ(first.history, second.history);
  EXPECT_NE(first.history, history);
  set.Leave(1);
  const auto missing = [&set] {
    return std::string(set.servers().at(0).engine().replicas().Read().whole.message());
  };
  while (missing().find("did not join") == std::string::npos) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(missing(), "replica 1 of 2 did not join");
}

INSTANTIATE_TEST_SUITE_P(Replicas, ReplicaSetTest,
                         ::testing::Values(SetSize{2}, SetSize{3}, SetSize{2, 2}, SetSize{3, 2}));
TEST(ReplicaSet, AWindowIsNotEndedWithoutAllReplicasAndStaysOpen) {
  SetUnderTest set(2);
  set.Meet(0);
  set.servers().at(0).Compute(7, 3);
  const absl::StatusOr<StepResult> early = set.servers().Step(1, kStep);
  EXPECT_EQ(early.status().code(), absl::StatusCode::kUnavailable) << early.status();
  set.servers().at(0).Compute(8, 2);
  set.servers().at(1).Compute(9, 2);
  set.Meet(1);
  set.AwaitWhole();
  const absl::StatusOr<StepResult> step = set.servers().Step(1, kStep);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->window_tokens, 7U);
}

TEST(ReplicaSet, AHeadThatIsDeletedAtOneReplicaHoldsUpNobody) {
  SetUnderTest set(3);
  set.MeetAll();
  for (int32_t replica = 0; replica < 3; ++replica) set.servers().at(replica).Compute(7, 3);
  auto asked = set.servers().BeginStep(1, set.servers().Marks(), kStep);
  while (!set.AnyIn(EndingPhase::kSealed) &&
         asked.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
  }
  (void)set.servers().at(2).engine().DeleteHead("h", engine::Engine::DiscardGradient::kYes, [] {});
  const absl::Status answered = ReplicaServers::Answer(std::move(asked)).status();
  EXPECT_TRUE(answered.ok() || absl::IsUnavailable(answered) || absl::IsNotFound(answered)) << answered;
}

TEST(ReplicaSet, ItLeavesWhileItWaitsForOthers) {
  SetUnderTest set(3);
  set.Meet(0);
  set.Meet(1);  // which has joined, and waits for all to have said hello
  while (set.proxy().faults() == 0 && set.set(0).Whole().message() != "replica 2 of 3 did not join") {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  set.Leave(1);
  set.Leave(0);
}

TEST(ReplicaSet, MarksOfSessionsThatAreNowhereAreRefused) {
  SetUnderTest set(2);
  set.MeetAll();
  for (const char* session : {"r7.somewhere", "a session of a server that was alone"}) {
    const absl::Status refused =
        set.servers().Step(1, {{.session_id = session, .lanes = {{.accepted = 1}}}}, kStep).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_THAT(refused.message(), HasSubstr(session));
  }
}

TEST(ReplicaSet, WhoIsLeftByAReplicaSaysSo) {
  SetUnderTest set(2);
  set.MeetAll();
  set.Leave(1);
  while (set.set(0).Whole().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  set.servers().at(0).Compute(7, 3);
  EXPECT_EQ(set.servers().Step(1, kStep).status().code(), absl::StatusCode::kUnavailable);
}

TEST(ReplicaSet, RowsGoBetweenTheCoordinatorAndWhoHoldsThem) {
  SetUnderTest set(3);
  const absl::Status early = set.set(0).FindPart(*set.servers().at(0).head(), 1).status();
  EXPECT_EQ(early.code(), absl::StatusCode::kUnavailable) << early;
  set.MeetAll();
  const std::string bytes(5 * ReplicaServers::kHidden * sizeof(float), 'x');
  for (int32_t replica = 1; replica < 3; ++replica) {
    const std::shared_ptr<engine::ReplicaPart> part = set.servers().Part(replica);
    const engine::PartRows rows{"exp_avg", {12 * replica, 5}};  // of the slice that it steps
    EXPECT_EQ(Read(*part, rows)->size(), bytes.size());
    EXPECT_EQ(Read(*part, {"exp_avg", {0, 5}}).status().code(), absl::StatusCode::kInternal);
    EXPECT_FALSE(Write(*part, rows, bytes).ok()) << "only a restore writes over what a replica has";
    EXPECT_EQ(Read(*part, {"exp_avg", {36, 2}}).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(Read(*part, {"hearsay", {0, 1}}).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST(ReplicaSet, WeightsOfAnotherVersionAreNotSteppedTogether) {
  SetUnderTest set(2);
  set.MeetAll();
  set.servers().at(1).WriteWeights(2);
  const std::vector<float> weights = set.servers().at(0).Weights();
  set.servers().at(0).Compute(7, 3);
  const absl::Status refused = set.servers().Step(1, kStep).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("replica 1: the weights of head h are of version 2"));
  EXPECT_EQ(set.servers().at(0).Weights(), weights);
}

}  // namespace
}  // namespace lossd::rpc::replica_set_test
