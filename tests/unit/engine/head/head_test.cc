// The exactly-once path of a head, without gRPC: the device is a fake that can be held at the gate.
#include "server/engine/head/head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::head_test {
namespace {

using lossd::testing::Await;
using ::testing::HasSubstr;

class HeadTest : public ::testing::Test, protected EngineFixture {
 protected:
  std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

TEST_F(HeadTest, ARepeatIsComputedAgainAndNeverAddedAgain) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 10));
  Submit(lane, MakeChunk(1, 10));
  Submit(lane, MakeChunk(2, 1));
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(3);
  EXPECT_EQ(answers[0].disposition, Disposition::kAccumulated);
  EXPECT_EQ(answers[1].disposition, Disposition::kRepeated);
  EXPECT_EQ(answers[1].losses, answers[0].losses);
  EXPECT_EQ(GradientSum(), 11);
}

TEST_F(HeadTest, CuttingAStreamWithdrawsWhatWasNotStartedAndFinishesWhatWas) {
  const std::string session = Open("c");
  gate.Hold();
  const LaneAttachment lane = Attach(session, listener_);
  for (uint64_t sequence = 1; sequence <= 4; ++sequence) Submit(lane, MakeChunk(sequence, 1));
  gate.AwaitArrival();  // 1 is started
  head->DetachLane(lane);
  const LaneAttachment again = Attach(session, listener_);
  EXPECT_EQ(again.marks.accepted, 1U);
  EXPECT_EQ(again.marks.applied, 0U);
  gate.LetThrough();
  engine->WaitIdle();
  for (uint64_t sequence = 2; sequence <= 4; ++sequence) Submit(again, MakeChunk(sequence, 100));
  EXPECT_EQ(GradientSum(), 301);
  EXPECT_EQ(engine->counters().chunks_withdrawn, 3U);
  EXPECT_EQ(engine->counters().queued_chunks, 0);
}

TEST_F(HeadTest, ANewStreamFencesTheOldOneAndTheOldOneCanDoNothingMore) {
  const std::string session = Open("c");
  const LaneAttachment old_lane = Attach(session, listener_);
  auto other = std::make_shared<RecordingListener>();
  const LaneAttachment new_lane = Attach(session, other);
  ASSERT_TRUE(listener_->ended().has_value());
  EXPECT_EQ(listener_->ended()->code(), absl::StatusCode::kAborted);
  Chunk chunk = MakeChunk(1, 1);
  EXPECT_EQ(head->Submit(old_lane, chunk, [] {}).status().code(), absl::StatusCode::kAborted);
  Submit(new_lane, MakeChunk(1, 5));
  head->DetachLane(old_lane);  // comes late: must not take anything from the new stream
  Submit(new_lane, MakeChunk(2, 5));
  EXPECT_EQ(GradientSum(), 10);
}

TEST_F(HeadTest, TheAppliedMarkOfAStartedChunkReachesTheStreamThatCameAfter) {
  const std::string session = Open("c");
  gate.Hold();
  Submit(Attach(session, listener_), MakeChunk(1, 1));
  gate.AwaitArrival();
  auto other = std::make_shared<RecordingListener>();
  Attach(session, other);
  gate.LetThrough();
  engine->WaitIdle();
  EXPECT_EQ(other->applied(), 1U);
}

TEST_F(HeadTest, ARejectedChunkConsumesItsSequenceAndIsEmpty) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Chunk bad = MakeChunk(1, 1);
  bad.labels[0] = 99;
  Submit(lane, std::move(bad));
  Submit(lane, MakeChunk(2, 1));
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(2);
  EXPECT_EQ(answers[0].disposition, Disposition::kRejected);
  EXPECT_EQ(answers[1].disposition, Disposition::kAccumulated);
  EXPECT_EQ(GradientSum(), 1);
  EXPECT_EQ(listener_->applied(), 2U);
}

TEST_F(HeadTest, FlushWaitsForWhatWasAcceptedAndHoldsBackTheNextGeneration) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 3));
  std::promise<absl::StatusOr<FlushInfo>> flushed;
  head->BeginFlush(1, Marks(), 1.0f,
                   [&](absl::StatusOr<FlushInfo> flush) { flushed.set_value(std::move(flush)); });
  Chunk next = MakeChunk(2, 7, 2);
  std::promise<void> resumed;
  EXPECT_EQ(*head->Submit(lane, next, [] {}), Head::Submission::kWait);
  gate.LetThrough();
  const absl::StatusOr<FlushInfo> flush = Await("the flush to begin", flushed);
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->window_tokens, 1U);

  Chunk late = MakeChunk(2, 7, 1);
  const absl::Status refused = head->Submit(lane, late, [] {}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("sealed"));
  EXPECT_EQ(*head->Submit(lane, next, [&] { resumed.set_value(); }), Head::Submission::kWait);
  EXPECT_EQ(*CommitFlush(*head, flush->flush_id), 2U);
  Await("a waiting lane to be resumed", resumed);
  Submit(lane, std::move(next));
  EXPECT_EQ(GradientSum(), 7) << "the new window starts from nothing";
  EXPECT_EQ(*CommitFlush(*head, flush->flush_id), 2U) << "a repeated commit answers the same";
}

TEST_F(HeadTest, AFlushWhoseMarksAreWithdrawnMeanwhileFailsAndTheWindowReopensWhole) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 3));
  Submit(lane, MakeChunk(2, 4));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<FlushInfo>> flushed;
  head->BeginFlush(1, Marks(), 1.0f,
                   [&](absl::StatusOr<FlushInfo> flush) { flushed.set_value(std::move(flush)); });
  head->DetachLane(lane);
  gate.LetThrough();
  const absl::StatusOr<FlushInfo> flush = Await("the flush to begin", flushed);
  EXPECT_EQ(flush.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(flush.status().message()),
              HasSubstr("marks name accepted 2, the server has accepted 1"));
  EXPECT_EQ(GradientSum(), 3);
}

TEST_F(HeadTest, BeginFlushIsIdempotentAndAbortReopensTheWindow) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 3));
  engine->WaitIdle();
  const absl::StatusOr<FlushInfo> first = BeginFlush(1, Marks());
  const absl::StatusOr<FlushInfo> second = BeginFlush(1, Marks());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->flush_id, second->flush_id);
  EXPECT_EQ(*AbortFlush(*head, first->flush_id), 1U);
  EXPECT_EQ(*AbortFlush(*head, first->flush_id), 1U) << "a repeated abort answers the same";
  EXPECT_FALSE(head->CheckFlush(first->flush_id).ok());
  EXPECT_FALSE(CommitFlush(*head, first->flush_id).ok()) << "what was aborted cannot be committed";
  Submit(lane, MakeChunk(2, 4));
  EXPECT_EQ(GradientSum(), 7);
}

TEST_F(HeadTest, AnEmptyWindowFlushesAsZeros) {
  const absl::StatusOr<FlushInfo> flush = BeginFlush(1, {});
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->stats.norm, 0);
  EXPECT_EQ(flush->rows, kVocab);
}

TEST_F(HeadTest, AClientThatVanishesWhileItsChunkWaitsLeavesNothingBehind) {
  auto doomed = std::make_shared<RecordingListener>();
  const std::weak_ptr<RecordingListener> watch = doomed;
  const LaneAttachment lane = Attach(Open("c"), doomed);
  const absl::StatusOr<FlushInfo> flush = BeginFlush(1, {});
  Chunk chunk = MakeChunk(1, 1, 2);
  EXPECT_EQ(*head->Submit(lane, chunk, [doomed] { ADD_FAILURE() << "a detached stream was resumed"; }),
            Head::Submission::kWait);
  head->DetachLane(lane);
  doomed = nullptr;
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(engine->counters().chunks_withdrawn, 1U);
  EXPECT_TRUE(CommitFlush(*head, flush->flush_id).ok());
}

TEST_F(HeadTest, DrainWakesWaitingChunksAndRefusesNewOnes) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  ASSERT_TRUE(BeginFlush(1, {}).ok());
  Chunk chunk = MakeChunk(1, 1, 2);
  std::promise<void> resumed;
  EXPECT_EQ(*head->Submit(lane, chunk, [&] { resumed.set_value(); }), Head::Submission::kWait);
  engine->BeginDrain();
  Await("a waiting lane to be resumed", resumed);
  EXPECT_EQ(head->Submit(lane, chunk, [] {}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine->OpenSession("h", {"late", 0, 1}).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(HeadTest, WeightsArePublishedOnceAllRowsCameAndOldStreamsWriteNoMore) {
  const std::string write = *head->BeginWrite("key", Head::Replace::kNo, "one");
  EXPECT_EQ(*head->BeginWrite("key", Head::Replace::kNo, "two"), write) << "the same key shares one write";
  EXPECT_FALSE(head->BeginWrite("other", Head::Replace::kNo, "three").ok());
  const std::shared_ptr<StagedWrite> staged = *head->FindWrite(write);
  const std::string row(kHidden * 4, 'x');
  for (int64_t i = 0; i < kVocab; ++i) {
    ASSERT_TRUE(staged->Write(i, 1, kernels::DataType::kFloat32, row).ok());
  }
  for (int repeat = 0; repeat < 2; ++repeat) {
    std::promise<uint64_t> version;
    head->CommitWrite(write,
                      [&](const absl::StatusOr<uint64_t>& published) { version.set_value(*published); });
    EXPECT_EQ(Await("the answer", version), 2U);
  }
  EXPECT_EQ(staged->Write(0, 1, kernels::DataType::kFloat32, row).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(HeadTest, DeletingAHeadEndsItsStreamsAndForgetsItsSessions) {
  const std::string session = Open("c");
  const LaneAttachment lane = Attach(session, listener_);
  Submit(lane, MakeChunk(1, 1));
  EXPECT_EQ(engine->DeleteHead("h", Engine::DiscardGradient::kNo).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kYes).ok());
  ASSERT_TRUE(listener_->ended().has_value());
  EXPECT_EQ(listener_->ended()->code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine->FindSession(session, engine->incarnation()).status().code(), absl::StatusCode::kNotFound);
  engine->WaitIdle();
  head = nullptr;
  EXPECT_EQ(engine->budget().reserved(), 0);
}

TEST_F(HeadTest, AChunkOfAStreamThatIsGoneComesTooLate) {
  const std::string session = Open("c");
  const LaneAttachment lane = Attach(session, listener_);
  head->DetachLane(lane);
  Chunk chunk = MakeChunk(1, 1);
  EXPECT_EQ(head->Submit(lane, chunk, [] {}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Attach(session, listener_).marks.accepted, 0U);
}

TEST_F(HeadTest, ADeletedHeadGivesItsMemoryBackThoughOneStillHoldsIt) {
  std::promise<void> released;
  ASSERT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kYes, [&] { released.set_value(); }).ok());
  Await("the head to be released", released);
  EXPECT_EQ(engine->budget().reserved(), 0);
  EXPECT_TRUE(head->Info().memory.empty());
  std::promise<absl::StatusCode> read;
  std::vector<float> row(kHidden);
  head->ReadWeights(
      0, 1, kernels::DataType::kFloat32, {row.data()},
      [&](const absl::StatusOr<uint64_t>& version) { read.set_value(version.status().code()); });
  EXPECT_EQ(Await("what is read", read), absl::StatusCode::kNotFound);
  EXPECT_EQ(BeginFlush(1, {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(CommitFlush(*head, "f").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(HeadTest, OnlyTheCallThatMakesASessionSaysThatItIsNew) {
  const auto is_new = [this] { return engine->OpenSession("h", {"c", 0, 2})->is_new; };
  EXPECT_TRUE(is_new());
  EXPECT_FALSE(is_new());
  ASSERT_TRUE(engine->CloseSession(engine->OpenSession("h", {"c", 0, 2})->info.session_id).ok());
  EXPECT_TRUE(is_new());
}

TEST_F(HeadTest, ClosedSessionsThatTheWindowRemembersAreBoundedUntilItEnds) {
  absl::Status refused;
  for (int i = 0; i < 10000 && refused.ok(); ++i) {
    const absl::StatusOr<OpenedSession> opened = engine->OpenSession("h", {"c", 0, 1});
    refused = opened.status();
    if (!opened.ok()) break;
    Submit(Attach(opened->info.session_id, listener_), MakeChunk(1, 1));
    engine->WaitIdle();
    ASSERT_TRUE(engine->CloseSession(opened->info.session_id).ok());
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryDelayOf(refused).has_value());
  const absl::StatusOr<FlushInfo> flush = BeginFlush(1, Marks());
  ASSERT_TRUE(flush.ok()) << flush.status();
  ASSERT_TRUE(CommitFlush(*head, flush->flush_id).ok());
  EXPECT_TRUE(engine->OpenSession("h", {"c", 0, 1}).ok());
}

TEST_F(HeadTest, AGradientThatAFailedDeviceLeftHalfAddedIsNeverHandedOut) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  gate.Fail();
  Submit(lane, MakeChunk(1, 2));
  Submit(lane, MakeChunk(2, 2));
  std::promise<absl::StatusOr<FlushInfo>> begun;
  head->BeginFlush(1, Marks(), 1.0f,
                   [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
  gate.LetThrough();
  EXPECT_EQ(Await("the flush to begin", begun).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(BeginFlush(1, Marks()).status().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(listener_->ended().has_value());
  EXPECT_EQ(listener_->ended()->code(), absl::StatusCode::kInternal);
  EXPECT_EQ(listener_->answers(), 0U);
  EXPECT_EQ(engine->counters().queued_chunks, 0);
}

class LeaseTest : public ::testing::Test, protected EngineFixture {
 protected:
  static EngineOptions ShortLease() {
    EngineOptions options;
    options.session_lease = absl::ZeroDuration();
    return options;
  }
  LeaseTest() : EngineFixture(ShortLease()) {}
};

TEST_F(LeaseTest, ASessionThatIsUsedAgainMeanwhileDoesNotExpire) {
  const std::string session = Open("c");
  const absl::Time before = MonotonicNow();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_THAT(head->IdleSessions(MonotonicNow()), ::testing::ElementsAre(session));
  EXPECT_EQ(Open("c"), session);  // after the search for idle sessions, before its session is closed
  EXPECT_EQ(head->CloseSession(session, before).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine->CloseSession(session).ok());
  EXPECT_EQ(engine->sessions(), 0);
}

TEST_F(LeaseTest, AnIdleSessionExpiresButItsContributionStays) {
  const std::string session = Open("c");
  const LaneAttachment lane = Attach(session, std::make_shared<RecordingListener>());
  Submit(lane, MakeChunk(1, 3));
  engine->WaitIdle();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  engine->ExpireSessions();
  EXPECT_EQ(engine->sessions(), 1) << "a session with a stream does not expire";
  head->DetachLane(lane);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  engine->ExpireSessions();
  EXPECT_EQ(engine->sessions(), 0);
  EXPECT_EQ(GradientSum(), 3);
}

}  // namespace
}  // namespace lossd::engine::head_test
