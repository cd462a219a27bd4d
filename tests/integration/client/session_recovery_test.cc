// lossd::Session when streams break, servers restart and others interfere, at exact points; with one lane and
// with several.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "lossd/client.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "tests/support/call_recorder.h"
#include "tests/support/session_data.h"
#include "tests/support/session_fixture.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"

namespace lossd::session_recovery_test {
namespace {

using testing::Data;
using ::testing::Each;
using testing::Fate;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kTokensPerChunk;
using testing::kVocab;
using testing::LanesFixture;
using testing::LanesTest;
using testing::RealServer;
using testing::SessionTest;
using ::testing::SizeIs;

TEST_F(SessionTest, ServerThatCannotBeReachedIsUnavailable) {
  const auto client = Client::Connect("127.0.0.1:1", {.reconnect_timeout = std::chrono::milliseconds(100)});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("127.0.0.1:1"));
}

TEST_F(SessionTest, ConnectWaitsForAServerThatIsNotReadyYet) {
  server_.recorder().Refuse("GetStatus", 3);
  int asked = 0;
  server_.recorder().before_call = [&asked](const std::string& method, int number) {
    if (method == "GetStatus") asked = number;
  };
  EXPECT_TRUE(Client::Connect(server_.target(), {}).ok());
  EXPECT_EQ(asked, 4);
}

// Broken streams

struct Cut {
  int32_t lanes;
  int lane;
  uint64_t sequence;
};

class CutTest : public LanesFixture, public ::testing::WithParamInterface<std::tuple<Cut, Fate>> {
 protected:
  CutTest() : LanesFixture(std::get<Cut>(GetParam()).lanes) {}
};

TEST_P(CutTest, OnlyThatLaneSendsAgainAndEverythingIsAddedOnce) {
  const auto [cut, fate] = GetParam();
  Script(cut.sequence, fate, cut.lane);
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
  // A stream that broke behind the very last answer is noticed by the next batch only.
  const bool is_last = cut.sequence == Dealt().at(static_cast<size_t>(cut.lane));
  EXPECT_EQ(session.reconnects(), fate == Fate::kCutAfterAnswer && is_last ? 0 : 1);
  EXPECT_EQ(result->repeated_chunks, fate == Fate::kCutBeforeAnswer ? 1 : 0);
  ExpectPlaces();
  EXPECT_EQ(AcceptedOf(session), Dealt());
  for (int lane = 0; lane < lanes_; ++lane) {
    if (lane == cut.lane) continue;
    EXPECT_EQ(Sent(lane), static_cast<int64_t>(Dealt().at(static_cast<size_t>(lane)))) << "lane " << lane;
  }

  Data next(kTokens, 3);
  ASSERT_TRUE(session.Compute(next.batch(), next.outputs()).ok());
  next.ExpectOutputs();
  EXPECT_EQ(session.reconnects(), 1);
  std::vector<float> window = data.Window();
  next.AddTo(&window, 0, kTokens);
  EXPECT_EQ(server_.window(), window);
}

INSTANTIATE_TEST_SUITE_P(AtEachPoint, CutTest,
                         ::testing::Combine(::testing::Values(Cut{1, 0, 1}, Cut{1, 0, 2}, Cut{1, 0, 9},
                                                              Cut{1, 0, 10}, Cut{4, 0, 1}, Cut{4, 0, 3},
                                                              Cut{4, 1, 2}, Cut{4, 2, 1}, Cut{4, 3, 2}),
                                            ::testing::Values(Fate::kCutBeforeTaking, Fate::kCutBeforeAnswer,
                                                              Fate::kCutAfterAnswer,
                                                              Fate::kEndBeforeTaking)));

TEST_F(SessionTest, SeveralLostAnswersAreAllRepeated) {
  server_.recorder().on_chunk = [](int, uint64_t sequence, int attempt) {
    if (attempt > 0 || sequence > 3) return Fate::kTake;
    return sequence == 3 ? Fate::kCutBeforeAnswer : Fate::kLoseAnswer;
  };
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
  EXPECT_EQ(result->repeated_chunks, 3);
}

// What happens to the last lane happens to all.
class RecoveryTest : public LanesTest {};
INSTANTIATE_TEST_SUITE_P(OneAndSeveral, RecoveryTest, ::testing::Values(1, 4));

TEST_P(RecoveryTest, AllLanesBrokenAtOnceAllComeBack) {
  server_.recorder().on_chunk = [](int lane, uint64_t sequence, int attempt) {
    if (sequence != 2 || attempt > 0) return Fate::kTake;
    return lane % 2 == 0 ? Fate::kCutBeforeTaking : Fate::kCutBeforeAnswer;
  };
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
  EXPECT_EQ(session.reconnects(), lanes_);
  EXPECT_EQ(result->repeated_chunks, lanes_ / 2);
  ExpectPlaces();
}

TEST_F(SessionTest, KeepsTryingWhileEveryStreamBreaks) {
  server_.recorder().on_chunk = [](int, uint64_t, int attempt) {
    return attempt < 3 ? Fate::kCutBeforeTaking : Fate::kTake;
  };
  Session session = Open();
  Data data(6);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(server_.window(), data.Window());
  EXPECT_EQ(session.reconnects(), 9);
}

TEST_P(RecoveryTest, GivesUpAfterTheReconnectTimeoutWithoutProgress) {
  server_.recorder().on_chunk = [this](int lane, uint64_t sequence, int) {
    return lane == last_ && sequence == 2 ? Fate::kCutBeforeTaking : Fate::kTake;
  };
  Connect({.reconnect_timeout = std::chrono::milliseconds(300)});
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("gave up reconnecting after 300 ms"));
  EXPECT_FALSE(IsWindowLost(result.status()));
  // The fate of the batch is not known to the caller, so the session must not go on as if nothing had
  // happened.
  const size_t sent = server_.observed().chunks.size();
  const auto later = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(later.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(later.status().message()), HasSubstr("earlier error"));
  EXPECT_THAT(server_.observed().chunks, SizeIs(sent));
}

TEST_P(RecoveryTest, StreamsThatBrokeBetweenBatchesAreMadeAgain) {
  server_.recorder().on_chunk = [](int, uint64_t sequence, int) {
    return sequence == 2 ? Fate::kCutAfterAnswer : Fate::kTake;
  };
  Session session = OpenLanes();
  Data data(2 * lanes_ * kTokensPerChunk);
  std::vector<float> window(kVocab * kHidden, 0.0F);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
    data.AddTo(&window, 0, data.labels.size());
  }
  EXPECT_EQ(server_.window(), window);
  for (const LaneMarks& lane : session.marks().lanes) EXPECT_EQ(lane.accepted, 4U);
}

// Other processes

TEST_P(RecoveryTest, ASequenceTakenByAnotherProcessWhileTheStreamWasBrokenIsNotMistakenForOurOwn) {
  std::atomic<bool> is_overtaken = false;
  server_.recorder().on_chunk = [&](int lane, uint64_t sequence, int) {
    if (lane != last_ || sequence != 1) return Fate::kTake;
    is_overtaken = true;
    return Fate::kCutBeforeTaking;
  };
  server_.recorder().Edit<v1::ComputeResponse>("Compute", [&](auto* response) {
    if (!is_overtaken || !response->has_ready() || response->ready().marks().lane() != last_) return;
    response->mutable_ready()->mutable_marks()->set_accepted(2);  // this process has sent one
  });
  Session session = OpenLanes();
  Data data(lanes_ * kTokensPerChunk);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("client_key 'trainer'"));
}

TEST_P(RecoveryTest, SequenceTakenByAnotherProcessIsNotMistakenForOurOwn) {
  server_.recorder().Edit<v1::ComputeResponse>("Compute", [](auto* response) {
    if (response->result().sequence() != 2) return;
    response->mutable_result()->set_disposition(v1::DISPOSITION_REPEATED);
  });
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("client_key 'trainer'"));
}

TEST_P(RecoveryTest, AnswerOfTheWrongSizeIsInternal) {
  server_.recorder().Edit<v1::ComputeResponse>("Compute", [](auto* response) {
    if (response->result().sequence() == 2) response->mutable_result()->mutable_dx()->resize(1);
  });
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("1 of dx; expected 8 and 24"));
}

TEST_F(SessionTest, ExpiredSessionWithWorkInTheWindowIsAnError) {
  server_.Before(3, [this] {
    server_.AwaitApplied(2);
    server_.Expire();
  });
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("has expired"));
  EXPECT_FALSE(IsWindowLost(result.status()));
}

// Restarts

class RestartTest : public LanesFixture,
                    public ::testing::WithParamInterface<std::tuple<int32_t, RealServer::With>> {
 protected:
  RestartTest() : LanesFixture(std::get<int32_t>(GetParam())) {}

  const RealServer::With with_ = std::get<RealServer::With>(GetParam());
};
INSTANTIATE_TEST_SUITE_P(WithAndWithoutHead, RestartTest,
                         ::testing::Combine(::testing::Values(1, 4),
                                            ::testing::Values(RealServer::With::kSameHead,
                                                              RealServer::With::kNoHead)));

TEST_P(RestartTest, AfterAnAcceptedChunkTheWindowIsLost) {
  server_.BeforeOf(lanes_ / 2, 2, [this] {
    server_.AwaitApplied(1);
    server_.Restart(with_);
  });
  Session session = OpenLanes();
  Data data(kTokens);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_TRUE(IsWindowLost(result.status())) << result.status();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("window lost: replay since generation 1"));
  if (with_ == RealServer::With::kSameHead) {
    EXPECT_EQ(server_.window(), std::vector<float>(kVocab * kHidden, 0.0F));
  }
  // And stays lost.
  EXPECT_TRUE(IsWindowLost(session.Compute(data.batch(), data.outputs()).status()));
}

TEST_P(RestartTest, UnansweredChunkCountsAsContributed) {
  server_.BeforeOf(0, 1, [this] { server_.Restart(with_); });
  Session session = OpenLanes();
  Data data(kTokensPerChunk);
  EXPECT_TRUE(IsWindowLost(session.Compute(data.batch(), data.outputs()).status()));
}

TEST_P(RecoveryTest, RestartWithNothingInAWindowGoesOnWithANewSessionOnAllLanes) {
  Session session = OpenLanes();
  Data data(kTokens);
  Batch losses = data.batch();
  losses.mode = ComputeMode::kLossOnly;
  ASSERT_TRUE(session.Compute(losses, {.losses = data.losses}).ok());
  server_.BeforeOf(last_, Dealt(kChunks, 1).back(), [this] { server_.Restart(); });
  const auto interrupted = session.Compute(losses, {.losses = data.losses});
  EXPECT_EQ(interrupted.status().code(), absl::StatusCode::kAborted) << interrupted.status();
  EXPECT_FALSE(IsWindowLost(interrupted.status()));

  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->first_sequences, Each(1U));
  EXPECT_EQ(server_.window(), data.Window());
}

TEST_F(SessionTest, RestartAfterACommitGoesOnWithANewSession) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const std::string old_id = session.id();
  std::vector<float> gradient(kVocab * kHidden);
  const SessionMarks marks = session.marks();
  ASSERT_TRUE(head_->Flush({}, {&marks, 1}, gradient.data()).ok());

  // The stream breaks under a batch of losses, which no window ever holds.
  server_.Before(3, [this] { server_.Restart(); });
  Data eval(2);
  Batch batch = eval.batch();
  batch.mode = ComputeMode::kLossOnly;
  const auto interrupted = session.Compute(batch, {.losses = eval.losses});
  EXPECT_EQ(interrupted.status().code(), absl::StatusCode::kAborted) << interrupted.status();
  EXPECT_FALSE(IsWindowLost(interrupted.status()));

  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->first_sequences.at(0), 1U);
  EXPECT_NE(session.id(), old_id);
  EXPECT_EQ(server_.window(), data.Window());
}

// The server names an earlier generation before the session hears why; its lanes stand where they did.
TEST_F(SessionTest, WindowsThatARestoreHasUndoneAreNotGoneOnFrom) {
  const engine::CheckpointFolder folder;
  server_.options.engine.checkpoints = *engine::CheckpointStore::Open(folder.path());
  Session session = Open();
  ASSERT_TRUE(head_->SaveCheckpoint("first").ok());
  for (int i = 0; i < 2; ++i) {
    const auto marks = session.marks();
    ASSERT_TRUE(head_->Discard({&marks, 1}).ok());
  }
  ASSERT_EQ(server_.generation(), 3U);
  server_.Before(1, [this] {
    EXPECT_TRUE(server_.server().engine().RestoreCheckpoint(testing::kHeadName, "first").ok());
  });
  Data data(1);
  const auto lost = session.Compute(data.batch(), data.outputs());
  EXPECT_TRUE(IsWindowLost(lost.status())) << lost.status();
  EXPECT_THAT(std::string(lost.status().message()), HasSubstr("restored from a checkpoint"));
}

}  // namespace
}  // namespace lossd::session_recovery_test
