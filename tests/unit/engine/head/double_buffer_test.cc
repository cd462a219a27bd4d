// Heads with a second gradient: chunks of the next window while a flush holds this one, and what becomes of
// them when it is committed or aborted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <utility>

#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::double_buffer_test {
namespace {

using lossd::testing::Await;
using ::testing::HasSubstr;

HeadConfig WithTwoGradients() {
  HeadConfig config;
  config.double_buffer = true;
  config.optimizer.kind = OptimizerKind::kSgd;
  return config;
}

class DoubleBufferTest : public ::testing::Test, protected EngineFixture {
 protected:
  explicit DoubleBufferTest(HeadConfig config = WithTwoGradients())
      : EngineFixture({}, {}, std::move(config)) {}

  // What is read of a flush: every element is the same.
  float Read(const std::string& flush_id) {
    std::vector<float> row(kHidden);
    std::promise<absl::Status> read;
    head->ReadGradient(flush_id, 0, 1, kernels::DataType::kFloat32, {row.data()},
                       [&](absl::Status status) { read.set_value(std::move(status)); });
    const absl::Status status = Await("what is read", read);
    EXPECT_TRUE(status.ok()) << status;
    return row[0];
  }
  // Begins a flush of the window with everything that it has accepted.
  FlushInfo Seal(uint64_t generation) {
    const absl::StatusOr<FlushInfo> flush = BeginFlush(generation, Marks());
    EXPECT_TRUE(flush.ok()) << flush.status();
    return *flush;
  }

  std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

TEST_F(DoubleBufferTest, ChunksOfTheNextWindowGoToTheOtherGradient) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 10));
  const FlushInfo first = Seal(1);
  Submit(lane, MakeChunk(2, 3, 2));
  Submit(lane, MakeChunk(3, 4, 2));
  engine->WaitIdle();
  EXPECT_EQ(listener_->applied(), 3U);
  EXPECT_EQ(Read(first.flush_id), 10) << "what is sealed stays as it is";
  EXPECT_EQ(head->Info().window_tokens, 1U);
  EXPECT_EQ(*CommitFlush(*head, first.flush_id), 2U);
  EXPECT_EQ(head->Info().window_tokens, 2U);

  const FlushInfo second = Seal(2);
  EXPECT_EQ(second.window_tokens, 2U);
  EXPECT_EQ(Read(second.flush_id), 7);
  Submit(lane, MakeChunk(4, 100, 3));
  EXPECT_EQ(Read(second.flush_id), 7);
  EXPECT_EQ(*CommitFlush(*head, second.flush_id), 3U);
  Submit(lane, MakeChunk(5, 1, 3));
  EXPECT_EQ(GradientSum(), 101) << "the first gradient began anew";
}

TEST_F(DoubleBufferTest, ACommitWhileChunksAreUnderWayLosesNothing) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 10));
  const FlushInfo first = Seal(1);
  gate.Hold();
  Submit(lane, MakeChunk(2, 3, 2));
  Submit(lane, MakeChunk(3, 4, 2));
  gate.AwaitArrival();
  EXPECT_EQ(*CommitFlush(*head, first.flush_id), 2U);
  Submit(lane, MakeChunk(4, 5, 2));
  gate.LetThrough();
  engine->WaitIdle();
  EXPECT_EQ(head->Info().window_tokens, 3U);
  EXPECT_EQ(GradientSum(), 12);
}

TEST_F(DoubleBufferTest, AnAbortAddsTheSecondGradientAndTheMarksSaySo) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 10));
  const FlushInfo flush = Seal(1);
  Submit(lane, MakeChunk(2, 3, 2));
  engine->WaitIdle();
  gate.Hold();
  Submit(lane, MakeChunk(3, 4, 2));
  gate.AwaitArrival();
  EXPECT_EQ(*AbortFlush(*head, flush.flush_id), 1U);
  EXPECT_EQ(Marks()[0].lanes[0].accepted, 3U);
  Submit(lane, MakeChunk(4, 100, 1));
  gate.LetThrough();
  engine->WaitIdle();
  EXPECT_EQ(head->Info().window_tokens, 4U);
  const FlushInfo again = Seal(1);
  EXPECT_EQ(Read(again.flush_id), 117);
  EXPECT_EQ(again.window_tokens, 4U);
  // And the second one began anew.
  Submit(lane, MakeChunk(5, 6, 2));
  EXPECT_EQ(*CommitFlush(*head, again.flush_id), 2U);
  EXPECT_EQ(GradientSum(), 6);
}

TEST_F(DoubleBufferTest, AfterAnAbortTheNextGenerationIsRefusedAndARepeatIsNotAddedAgain) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  const FlushInfo flush = Seal(1);
  Submit(lane, MakeChunk(1, 3, 2));
  EXPECT_EQ(*AbortFlush(*head, flush.flush_id), 1U);
  Submit(lane, MakeChunk(1, 3, 2));  // the answer was lost
  EXPECT_EQ(listener_->AwaitAnswers(2)[1].disposition, Disposition::kRepeated);
  Chunk chunk = MakeChunk(2, 5, 2);
  const absl::Status refused = head->Submit(lane, chunk, [] {}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(PositionOf(refused).has_value());
  EXPECT_EQ(PositionOf(refused)->generation, 1U);
  EXPECT_EQ(PositionOf(refused)->replay[0].next_sequence, 2U);
  EXPECT_EQ(GradientSum(), 3);
}

TEST_F(DoubleBufferTest, MarksOfEachWindowCountFromTheSealing) {
  const std::string session = Open("c");
  const LaneAttachment lane = Attach(session, listener_);
  Submit(lane, MakeChunk(1, 1));
  Submit(lane, MakeChunk(2, 1));
  const FlushInfo flush = Seal(1);
  Submit(lane, MakeChunk(3, 1, 2));
  engine->WaitIdle();
  const std::vector<SessionMarks> frozen = Marks();
  ASSERT_EQ(frozen.size(), 1U);
  EXPECT_EQ(frozen[0].lanes[0].accepted, 2U) << "a repeated BeginFlush has to name what was sealed";
  EXPECT_EQ(frozen[0].lanes[0].applied, 2U);
  EXPECT_EQ(BeginFlush(1, frozen)->flush_id, flush.flush_id);
  ASSERT_TRUE(CommitFlush(*head, flush.flush_id).ok());
  ASSERT_EQ(Marks().size(), 1U);
  EXPECT_EQ(Marks()[0].lanes[0].accepted, 3U);
  ASSERT_TRUE(CommitFlush(*head, Seal(2).flush_id).ok());
  EXPECT_TRUE(Marks().empty());
}

TEST_F(DoubleBufferTest, SessionsThatCloseAreRememberedAsLongAsAWindowHoldsSomethingOfThem) {
  const std::string before = Open("before");
  Submit(Attach(before, listener_), MakeChunk(1, 1));
  const FlushInfo flush = Seal(1);
  const std::string during = Open("during");
  Submit(Attach(during, std::make_shared<RecordingListener>()), MakeChunk(1, 20, 2));
  engine->WaitIdle();
  ASSERT_TRUE(engine->CloseSession(before).ok());
  ASSERT_TRUE(engine->CloseSession(during).ok());
  ASSERT_EQ(Marks().size(), 1U);
  EXPECT_EQ(Marks()[0].session_id, before);
  ASSERT_TRUE(CommitFlush(*head, flush.flush_id).ok());
  ASSERT_EQ(Marks().size(), 1U);
  EXPECT_EQ(Marks()[0].session_id, during);
  EXPECT_EQ(GradientSum(), 20);
}

TEST_F(DoubleBufferTest, ACutStreamWithdrawsWhatWasTakenForTheNextWindowOnly) {
  const std::string session = Open("c");
  const LaneAttachment lane = Attach(session, listener_);
  Submit(lane, MakeChunk(1, 10));
  const FlushInfo flush = Seal(1);
  gate.Hold();
  Submit(lane, MakeChunk(2, 3, 2));
  Submit(lane, MakeChunk(3, 4, 2));
  gate.AwaitArrival();  // 2 is started
  head->DetachLane(lane);
  const LaneAttachment again = Attach(session, listener_);
  EXPECT_EQ(again.marks.accepted, 2U);
  gate.LetThrough();
  Submit(again, MakeChunk(3, 50, 2));
  EXPECT_EQ(*CommitFlush(*head, flush.flush_id), 2U);
  EXPECT_EQ(GradientSum(), 53);
}

TEST_F(DoubleBufferTest, OneWindowEndsAfterTheOther) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 10));
  const FlushInfo flush = Seal(1);
  Submit(lane, MakeChunk(2, 3, 2));
  const std::string text = "generation is 2; generation 1 is sealed by flush " + flush.flush_id;
  const auto expect_refused = [&text](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  expect_refused(BeginFlush(2, {}).status());
  expect_refused(ApplyStep(2, {}, {.learning_rate = 1}).status());
  expect_refused(ReadStats(2, {}).status());
  EXPECT_EQ(BeginFlush(3, {}).status().code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(CommitFlush(*head, flush.flush_id).ok());
  ASSERT_TRUE(ApplyStep(2, Marks(), {.learning_rate = 1}).ok());
  EXPECT_EQ(Weight(), -3) << "a step takes the gradient that the window is in";
  Submit(lane, MakeChunk(3, 5, 3));
  ASSERT_TRUE(ApplyStep(3, Marks(), {.learning_rate = 1}).ok());
  EXPECT_EQ(Weight(), -8);
}

TEST_F(DoubleBufferTest, ChunksOfTheNextWindowWaitWhileThisOneIsSealed) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<FlushInfo>> begun;
  head->BeginFlush(1, Marks(), 1,
                   [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
  Chunk chunk = MakeChunk(2, 2, 2);
  std::promise<void> resumed;
  EXPECT_EQ(*head->Submit(lane, chunk, [&] { resumed.set_value(); }), Head::Submission::kWait);
  gate.LetThrough();
  const absl::StatusOr<FlushInfo> flush = Await("the flush to begin", begun);
  Await("a waiting lane to be resumed", resumed);
  EXPECT_EQ(*head->Submit(lane, chunk, [] {}), Head::Submission::kTaken);
  EXPECT_EQ(Read(flush->flush_id), 1);
  Chunk late = MakeChunk(3, 2, 1);
  EXPECT_EQ(head->Submit(lane, late, [] {}).status().code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(CommitFlush(*head, flush->flush_id).ok());
  EXPECT_EQ(GradientSum(), 2);
}

TEST_F(DoubleBufferTest, ChunksOfDeterministicSessionsWaitForTheCommit) {
  const absl::StatusOr<OpenedSession> opened = engine->OpenSession("h", {"d", 0, 1, Deterministic::kYes});
  ASSERT_TRUE(opened.ok()) << opened.status();
  const LaneAttachment lane = Attach(opened->info.session_id, listener_);
  Chunk first = MakeChunk(1, 8);
  first.window_token = 0;
  Submit(lane, std::move(first));
  const FlushInfo flush = Seal(1);
  Chunk next = MakeChunk(2, 5, 2);
  next.window_token = 0;
  std::promise<void> resumed;
  EXPECT_EQ(*head->Submit(lane, next, [&] { resumed.set_value(); }), Head::Submission::kWait);
  Submit(Attach(Open("c"), std::make_shared<RecordingListener>()), MakeChunk(1, 40, 2));
  EXPECT_EQ(Read(flush.flush_id), 8);
  ASSERT_TRUE(CommitFlush(*head, flush.flush_id).ok());
  Await("a waiting lane to be resumed", resumed);
  EXPECT_EQ(*head->Submit(lane, next, [] {}), Head::Submission::kTaken);
  EXPECT_EQ(GradientSum(), 45);
}

TEST_F(DoubleBufferTest, WhatTheNextWindowHoldsKeepsAHeadFromBeingDeletedUnasked) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Seal(1);
  Submit(lane, MakeChunk(1, 1, 2));
  EXPECT_EQ(engine->DeleteHead("h", Engine::DiscardGradient::kNo).code(),
            absl::StatusCode::kFailedPrecondition);
  std::promise<void> released;
  ASSERT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kYes, [&] { released.set_value(); }).ok());
  Await("the head to be released", released);
}

class OneBufferTest : public DoubleBufferTest {
 protected:
  OneBufferTest() : DoubleBufferTest(HeadConfig()) {}
};

TEST_F(OneBufferTest, WithoutASecondGradientChunksWait) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  const FlushInfo flush = Seal(1);
  Chunk chunk = MakeChunk(1, 2, 2);
  EXPECT_EQ(*head->Submit(lane, chunk, [] {}), Head::Submission::kWait);
  EXPECT_EQ(BeginFlush(2, {}).status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(CommitFlush(*head, flush.flush_id).ok());
}

}  // namespace
}  // namespace lossd::engine::double_buffer_test
