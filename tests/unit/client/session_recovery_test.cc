// lossd::Session when streams break, servers restart and others interfere, at exact points.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <tuple>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::session_recovery_test {
namespace {

using testing::Data;
using testing::FakeServer;
using testing::Fate;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kTokensPerChunk;
using testing::SessionTest;

// Broken streams

class CutTest : public SessionTest, public ::testing::WithParamInterface<std::tuple<int, Fate>> {};

TEST_P(CutTest, EverythingUnansweredIsSentAgainAndAddedOnce) {
  const auto [sequence, fate] = GetParam();
  Script(static_cast<uint64_t>(sequence), fate);
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  // A stream that broke behind the very last answer is noticed by the next batch only.
  EXPECT_EQ(session.reconnects(), fate == Fate::kCutAfterAnswer && sequence == 5 ? 0 : 1);
  EXPECT_EQ(result->repeated_chunks, fate == Fate::kCutBeforeAnswer ? 1 : 0);
  for (const auto& chunk : fake_.observed().chunks) {
    EXPECT_EQ(chunk.first_token(), static_cast<int64_t>(chunk.sequence() - 1) * kTokensPerChunk);
    EXPECT_EQ(chunk.generation(), 1U);
  }

  Data next(4, 3);
  ASSERT_TRUE(session.Compute(next.batch(), next.outputs()).ok());
  next.ExpectOutputs();
  std::vector<float> window = data.Window();
  next.AddTo(&window, 0, 4);
  EXPECT_EQ(fake_.window(), window);
}

INSTANTIATE_TEST_SUITE_P(AtEachPoint, CutTest,
                         ::testing::Combine(::testing::Range(1, 6),
                                            ::testing::Values(Fate::kCutBeforeTaking, Fate::kCutBeforeAnswer,
                                                              Fate::kCutAfterAnswer,
                                                              Fate::kEndBeforeTaking)));

TEST_F(SessionTest, SeveralLostAnswersAreAllRepeated) {
  fake_.hold_answers_until_chunks = 3;  // 1 and 2 are taken and not answered when 3 breaks the stream
  Script(3, Fate::kCutBeforeAnswer);
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  EXPECT_EQ(result->repeated_chunks, 3);
}

TEST_F(SessionTest, KeepsTryingWhileEveryStreamBreaks) {
  fake_.on_chunk = [](uint64_t /*sequence*/, int attempt) {
    return attempt < 3 ? Fate::kCutBeforeTaking : Fate::kTake;
  };
  Session session = Open();
  Data data(6);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  data.ExpectOutputs();
  EXPECT_EQ(fake_.window(), data.Window());
  EXPECT_EQ(session.reconnects(), 9);
}

TEST_F(SessionTest, GivesUpAfterTheReconnectTimeoutWithoutProgress) {
  fake_.on_chunk = [](uint64_t sequence, int) {
    return sequence == 2 ? Fate::kCutBeforeTaking : Fate::kTake;
  };
  Connect(std::chrono::milliseconds(300));
  Session session = Open();
  Data data(6);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("gave up reconnecting after 300 ms"));
  EXPECT_FALSE(IsWindowLost(result.status()));
  // The fate of the batch is not known to the caller, so the session must not go on as if nothing had
  // happened.
  const auto later = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(later.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(later.status().message()), HasSubstr("earlier error"));
  EXPECT_EQ(fake_.observed().chunks.back().sequence(), 2U);
}

TEST_F(SessionTest, ConnectWaitsForAServerThatIsNotReadyYet) {
  fake_.unavailable_status = 3;
  EXPECT_TRUE(Client::Connect(fake_.target(), {}).ok());
  EXPECT_EQ(fake_.unavailable_status, 0);
}

// Restarts and other servers

class RestartTest : public SessionTest, public ::testing::WithParamInterface<Fate> {};

TEST_P(RestartTest, AfterAnAcceptedChunkTheWindowIsLost) {
  Script(3, GetParam());
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_TRUE(IsWindowLost(result.status())) << result.status();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("window lost: replay since generation 1"));
  EXPECT_EQ(fake_.window(), std::vector<float>(FakeServer::kVocab * kHidden, 0.0F));
  // And stays lost.
  EXPECT_TRUE(IsWindowLost(session.Compute(data.batch(), data.outputs()).status()));
}

TEST_P(RestartTest, UnansweredChunkCountsAsContributed) {
  Script(1, GetParam());
  Session session = Open();
  Data data(10);
  EXPECT_TRUE(IsWindowLost(session.Compute(data.batch(), data.outputs()).status()));
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutHead, RestartTest,
                         ::testing::Values(Fate::kRestartKeepHead, Fate::kRestartLoseHead));

TEST_F(SessionTest, RestartAfterACommitGoesOnWithANewSession) {
  Session session = Open();
  Data data(4);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const std::string old_id = session.id();
  std::vector<float> gradient(FakeServer::kVocab * kHidden);
  const SessionMarks marks = session.marks();
  ASSERT_TRUE(head_->Flush({}, {&marks, 1}, gradient.data()).ok());

  // The stream breaks under a batch of losses, which no window ever holds.
  Script(3, Fate::kRestartKeepHead);
  Data eval(2);
  Batch batch = eval.batch();
  batch.mode = ComputeMode::kLossOnly;
  const auto interrupted = session.Compute(batch, {.losses = eval.losses});
  EXPECT_EQ(interrupted.status().code(), absl::StatusCode::kAborted) << interrupted.status();
  EXPECT_FALSE(IsWindowLost(interrupted.status()));

  fake_.on_chunk = nullptr;
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->first_sequences.at(0), 1U);
  EXPECT_NE(session.id(), old_id);
  EXPECT_EQ(fake_.window(), data.Window());
}

// The server names an earlier generation before the session hears why; its lanes stand where they did.
TEST_F(SessionTest, WindowsThatARestoreHasUndoneAreNotGoneOnFrom) {
  Session session = Open();
  for (int i = 0; i < 2; ++i) {
    const auto marks = session.marks();
    ASSERT_TRUE(head_->Discard({&marks, 1}).ok());
  }
  ASSERT_EQ(fake_.generation(), 3U);
  Script(1, Fate::kRestoreBefore);
  Data data(1);
  const auto lost = session.Compute(data.batch(), data.outputs());
  EXPECT_TRUE(IsWindowLost(lost.status())) << lost.status();
  EXPECT_THAT(std::string(lost.status().message()), HasSubstr("restored from a checkpoint"));
}

TEST_F(SessionTest, SequenceTakenByAnotherProcessIsNotMistakenForOurOwn) {
  Script(2, Fate::kTakenBySomeoneElse);
  Session session = Open();
  Data data(10);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("client_key 'trainer'"));
}

TEST_F(SessionTest, AnswerOfTheWrongSizeIsInternal) {
  Script(2, Fate::kWrongSize);
  Session session = Open();
  Data data(4);
  const auto result = session.Compute(data.batch(), data.outputs());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("1 of dx; expected 8 and 24"));
}

}  // namespace
}  // namespace lossd::session_recovery_test
