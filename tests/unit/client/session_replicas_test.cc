// lossd::Session, and the ends of windows, where a head lies over replicas: which of them a session is at,
// and what is lost with one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::session_replicas_test {
namespace {

using testing::Data;
using ::testing::Each;
using testing::FakeServer;
using testing::Fate;
using ::testing::HasSubstr;
using testing::kTokensPerChunk;

constexpr uint64_t kHistory = 42;

// The client calls `fake_`; sessions are at `other_`.
class ReplicasTest : public testing::SessionTest {
 protected:
  ReplicasTest() {
    fake_.BecomeReplica(kHistory, "replica-0");
    other_.BecomeReplica(kHistory, "replica-1");
    fake_.sessions_at = &other_;
  }

  static std::vector<std::string> TargetsOf(const Session& session) {
    std::vector<std::string> targets;
    for (const LanePlace& place : session.lane_places()) targets.push_back(place.target);
    return targets;
  }
  static absl::Status Compute(Session& session, int64_t tokens = 6) {
    Data data(tokens);
    absl::Status status = session.Compute(data.batch(), data.outputs()).status();
    if (status.ok()) data.ExpectOutputs();
    return status;
  }
  // Adds nothing to the window. The batch that finds out that the stream has ended may have to be computed
  // again.
  static absl::Status Look(Session& session) {
    Data data(6);
    Batch batch = data.batch();
    batch.mode = ComputeMode::kLossOnly;
    BatchOutputs outputs = data.outputs();
    outputs.dx = nullptr;
    absl::Status status = session.Compute(batch, outputs).status();
    return absl::IsAborted(status) ? session.Compute(batch, outputs).status() : status;
  }
  // Chunk `sequence` meets this the first time that it arrives.
  void ScriptOther(uint64_t sequence, Fate fate) {
    other_.on_chunk = [sequence, fate](uint64_t arrived, int attempt) {
      return arrived == sequence && attempt == 0 ? fate : Fate::kTake;
    };
  }
  void LoseBefore(uint64_t sequence, const FakeServer::Loss& loss) {
    other_.loss = loss;
    ScriptOther(sequence, Fate::kReplicaLost);
  }

  FakeServer other_;
};

TEST_F(ReplicasTest, AllLanesAreWhereTheSessionIs) {
  Session session = Open("trainer", 3);
  ASSERT_TRUE(Compute(session, 12 * kTokensPerChunk).ok());
  EXPECT_THAT(TargetsOf(session), Each(other_.target()));
  EXPECT_EQ(fake_.observed().streams, 0);
  EXPECT_EQ(other_.observed().streams, 3);
  EXPECT_EQ(session.marks().incarnation, "replica-1");
}

TEST_F(ReplicasTest, LanesThatAreNotSpreadAreThereToo) {
  Connect();
  auto session = head_->OpenSession({.client_key = "trainer", .lanes = 2, .spread_lanes = false});
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE(Compute(*session, 12 * kTokensPerChunk).ok());
  EXPECT_THAT(TargetsOf(*session), Each(other_.target()));
}

// A name may have the addresses of all replicas: each connection by it may come to another one.
TEST_F(ReplicasTest, WhereANameWasCalledLanesGoToTheAddressThatAnswered) {
  fake_.sessions_at = nullptr;
  const std::string port = fake_.target().substr(fake_.target().rfind(':'));
  client_ = Client::Connect("localhost" + port, {}).value();
  head_ = std::make_unique<Head>(client_->GetHead(FakeServer::kName).value());
  Session session = Open("trainer", 2);
  ASSERT_TRUE(Compute(session, 12 * kTokensPerChunk).ok());
  EXPECT_THAT(TargetsOf(session), Each("ipv4:127.0.0.1" + port));
}

TEST_F(ReplicasTest, ASessionAtTheServerThatIsCalledHasItsLanesThere) {
  fake_.sessions_at = nullptr;
  Session session = Open("trainer", 2);
  ASSERT_TRUE(Compute(session, 12 * kTokensPerChunk).ok());
  EXPECT_THAT(TargetsOf(session), Each(fake_.target()));
}

TEST_F(ReplicasTest, ASessionIsClosedThroughTheServerThatIsCalled) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  ASSERT_TRUE(session.Close().ok());
  EXPECT_EQ(other_.observed().closed_sessions, 1);
}

TEST_F(ReplicasTest, AStreamThatBreaksIsAttachedThereAgain) {
  ScriptOther(2, Fate::kCutBeforeAnswer);
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  EXPECT_EQ(session.reconnects(), 1);
  EXPECT_THAT(TargetsOf(session), Each(other_.target()));
  EXPECT_EQ(fake_.observed().streams, 0);
}

TEST_F(ReplicasTest, AReplicaThatCannotBeReachedIsNotReplacedByAnyOther) {
  Connect(std::chrono::milliseconds(500));
  other_.lane_addresses = {"127.0.0.1:1"};
  const auto session = head_->OpenSession({.client_key = "trainer", .lanes = 1});
  EXPECT_EQ(session.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(fake_.observed().streams, 0);
}

// What is lost with a replica

TEST_F(ReplicasTest, AReplicaThatIsLostTakesTheWindowOfItsSessionsAlong) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  LoseBefore(4, {.incarnation = "replica-1 again", .generation = 1});
  const absl::Status lost = Compute(session);
  EXPECT_TRUE(IsWindowLost(lost)) << lost;
  EXPECT_THAT(std::string(lost.message()), HasSubstr("replica that had the session was lost"));
  EXPECT_THAT(std::string(lost.message()), HasSubstr("since generation 1 "));
  // The trainer replays.
  Session again = Open();
  EXPECT_TRUE(Compute(again).ok());
}

TEST_F(ReplicasTest, WhatAWindowThatHasEndedHadOfItIsNotLost) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  (void)session.marks();
  other_.Stop();  // behind a step that was taken with them
  FakeServer third;
  third.Lose({.incarnation = "replica-1 again", .generation = 2, .history = kHistory});
  fake_.sessions_at = &third;
  Data data(6);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(third.window(), data.Window());
  EXPECT_THAT(TargetsOf(session), Each(third.target()));
  EXPECT_EQ(session.marks().incarnation, "replica-1 again");
}

TEST_F(ReplicasTest, ABatchWhoseWindowEndedWithTheReplicaIsNotComputedAgain) {
  Session session = Open();
  LoseBefore(2, {.incarnation = "replica-1 again", .generation = 2});
  const absl::Status status = Compute(session);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("in the middle of this batch"));
  EXPECT_FALSE(IsWindowLost(status));
}

// The other trainer takes the step: this one finds out of it by the next batch, or by what is there instead.
TEST_F(ReplicasTest, ABatchThatCameAfterTheWindowIsComputedInTheNextOne) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  (void)session.marks();  // which the step names
  LoseBefore(4, {.incarnation = "replica-1 again", .generation = 2});
  Data data(6);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(other_.window(), data.Window());
}

TEST_F(ReplicasTest, ABatchThatTheWindowHasAPartOfIsNot) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  (void)session.marks();
  LoseBefore(5, {.incarnation = "replica-1 again", .generation = 2});
  const absl::Status status = Compute(session);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

TEST_F(ReplicasTest, AReplicaWithoutItsWorkIsReplacedWithoutAWord) {
  ScriptOther(3, Fate::kCutAfterAnswer);
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  ASSERT_TRUE(head_->ApplyStep({.generation = 1}, std::vector{session.marks()}).ok());
  other_.Lose({.incarnation = "replica-1 again", .generation = 2});
  const absl::Status status = Look(session);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(session.marks().incarnation, "replica-1 again");
  EXPECT_TRUE(Compute(session).ok());
}

// As one that was restored is, when any replica is lost.
TEST_F(ReplicasTest, AWindowThatTheServerHasDroppedIsLostThoughTheServerIsNot) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  other_.in_window = false;
  LoseBefore(4, {.incarnation = "replica-1", .generation = 1});
  const absl::Status lost = Compute(session);
  EXPECT_TRUE(IsWindowLost(lost)) << lost;
}

TEST_F(ReplicasTest, ASessionThatIsOpenedAgainIsLostWithWhatItHadInTheWindow) {
  {
    Session before = Open();
    ASSERT_TRUE(Compute(before).ok());
  }
  other_.in_window = true;
  other_.loss_before_streams = FakeServer::Loss{.incarnation = "replica-1 again", .generation = 1};
  const auto again = head_->OpenSession({.client_key = "trainer", .lanes = 1});
  EXPECT_TRUE(IsWindowLost(again.status())) << again.status();
}

TEST_F(ReplicasTest, ASessionThatIsOpenedAgainWithNothingInTheWindowIsReplacedWithoutAWord) {
  {
    Session before = Open();
    ASSERT_TRUE(Compute(before).ok());
    ASSERT_TRUE(head_->ApplyStep({.generation = 1}, std::vector{before.marks()}).ok());
  }
  other_.in_window = false;
  other_.loss_before_streams = FakeServer::Loss{.incarnation = "replica-1 again", .generation = 2};
  Session again = Open();
  EXPECT_FALSE(again.opened_in_window());
  EXPECT_TRUE(Compute(again).ok());
}

// What it was called before says nothing of where its sessions are now.
TEST_F(ReplicasTest, TheServerThatIsCalledHasItsSessionsAlsoWhenItIsStartedAnew) {
  fake_.sessions_at = nullptr;
  Script(3, Fate::kCutAfterAnswer);
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  ASSERT_TRUE(head_->ApplyStep({.generation = 1}, std::vector{session.marks()}).ok());
  fake_.Lose({.incarnation = "replica-0 again", .generation = 2});
  const absl::Status status = Look(session);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Compute(session).ok());
  EXPECT_THAT(TargetsOf(session), Each(fake_.target()));
}

TEST_F(ReplicasTest, ARestoredHeadIsAnotherPastOfTheSameHistory) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  LoseBefore(4, {.incarnation = "replica-1 again", .generation = 2, .history = kHistory, .restores = 1});
  const absl::Status lost = Compute(session);
  EXPECT_TRUE(IsWindowLost(lost)) << lost;
  EXPECT_THAT(std::string(lost.message()), HasSubstr("restored from a checkpoint"));
}

TEST_F(ReplicasTest, ASetThatWasMadeAnewHasLostEverything) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  LoseBefore(4, {.incarnation = "another", .generation = 2, .history = 43});
  const absl::Status lost = Compute(session);
  EXPECT_TRUE(IsWindowLost(lost)) << lost;
  EXPECT_THAT(std::string(lost.message()), HasSubstr("the server was restarted"));
}

// Ends of windows

// The server that is called has an incarnation of its own, which says nothing of the session's.
TEST_F(ReplicasTest, ARefusalByAnotherReplicaIsNoLostWindow) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  const auto stepped = head_->ApplyStep({.generation = 7}, std::vector{session.marks()});
  EXPECT_EQ(stepped.status().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(IsWindowLost(stepped.status())) << stepped.status();
}

TEST_F(ReplicasTest, MarksOfAReplicaBeforeItWasLostAreALostWindow) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  fake_.marks_of_another_past = true;
  const auto stepped = head_->ApplyStep({}, std::vector{session.marks()});
  EXPECT_TRUE(IsWindowLost(stepped.status())) << stepped.status();
  EXPECT_THAT(std::string(stepped.status().message()), HasSubstr("a replica was lost"));
}

TEST_F(ReplicasTest, ARefusalAfterTheSetWasMadeAnewIsALostWindow) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  fake_.BecomeReplica(43, "another");
  const auto stepped = head_->ApplyStep({.generation = 7}, std::vector{session.marks()});
  EXPECT_TRUE(IsWindowLost(stepped.status())) << stepped.status();
}

TEST_F(ReplicasTest, AReplicaThatHasNotMetTheOthersSaysNothingOfTheWindow) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  fake_.BecomeReplica(0, "just started");
  const auto stepped = head_->ApplyStep({.generation = 7}, std::vector{session.marks()});
  EXPECT_FALSE(IsWindowLost(stepped.status())) << stepped.status();
}

// A step whose answer is lost with one replica is asked for again through another, as the same step.
TEST_F(ReplicasTest, AStepWithoutAnAnswerIsTheSameOneAtAnotherReplica) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  fake_.slow_steps = 1;
  const std::vector marks{session.marks()};
  EXPECT_FALSE(head_->ApplyStep({}, marks).ok());
  fake_.BecomeReplica(kHistory, "replica-0 again");
  const auto stepped = head_->ApplyStep({}, marks);
  ASSERT_TRUE(stepped.ok()) << stepped.status();
  EXPECT_EQ(stepped->generation, 2U);
  for (const auto& step : fake_.observed().steps) EXPECT_EQ(step.generation(), 1U);
}

TEST_F(ReplicasTest, ACheckpointIsOfTheHistoryAndOfNoReplica) {
  const Session session = Open();
  ASSERT_TRUE(head_->SaveCheckpoint("tag").ok());
  ASSERT_EQ(fake_.observed().saves.size(), 1U);
  const v1::SaveCheckpointRequest save = fake_.observed().saves[0];
  EXPECT_EQ(save.incarnation(), "");
  EXPECT_EQ(save.history(), kHistory);
  EXPECT_TRUE(save.has_restores());
}

TEST_F(ReplicasTest, ACheckpointNamesWhatItIsToHave) {
  Session session = Open();
  ASSERT_TRUE(Compute(session).ok());
  const std::vector marks{session.marks()};
  ASSERT_TRUE(head_->SaveCheckpoint("tag", marks).ok());
  const v1::SaveCheckpointRequest save = fake_.observed().saves[0];
  ASSERT_EQ(save.marks_size(), 1);
  EXPECT_EQ(save.marks(0).session_id(), session.id());
  EXPECT_NE(save.marks(0).incarnation(), "");
}

}  // namespace
}  // namespace lossd::session_replicas_test
