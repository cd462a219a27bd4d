// Heads on a device that has several batches under way: gathered, answered in order, and never half.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <thread>

#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::device_loop_test {
namespace {

using lossd::testing::Await;
using ::testing::ElementsAre;

constexpr int64_t kRowsPerBatch = 4;

class DeviceLoopTest : public ::testing::Test, protected EngineFixture {
 protected:
  explicit DeviceLoopTest(EngineOptions options = {})
      : EngineFixture(std::move(options), {.most_batches = 3, .rows_per_batch = kRowsPerBatch}) {}

  static Chunk FullChunk(uint64_t sequence, float scale) {
    Chunk chunk = MakeChunk(sequence, scale);
    chunk.tokens = kRowsPerBatch;
    chunk.labels.resize(8 * kRowsPerBatch);
    chunk.hidden_states = Payload::Of(std::string(kRowsPerBatch * kHidden * 4, '\0'));
    return chunk;
  }
  static Chunk BadChunk(uint64_t sequence) {
    Chunk chunk = MakeChunk(sequence, 1000);
    chunk.labels[0] = 99;
    return chunk;
  }
  // Holds the device with two batches under way: their sequences are 1 and 2, their scales too.
  void KeepBusy(const LaneAttachment& lane) {
    gate.Hold();
    for (uint64_t sequence = 1; sequence <= 2; ++sequence) {
      Submit(lane, MakeChunk(sequence, static_cast<float>(sequence)));
      gate.AwaitStarted(sequence);
    }
  }
  std::vector<uint64_t> AnsweredSequences(size_t count) {
    std::vector<uint64_t> sequences;
    for (const ChunkAnswer& answer : listener_->AwaitAnswers(count)) sequences.push_back(answer.sequence);
    return sequences;
  }

  std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
  std::shared_ptr<RecordingListener> other_ = std::make_shared<RecordingListener>();
};

TEST_F(DeviceLoopTest, SmallChunksOfSeveralSessionsAreGatheredWhileTheDeviceIsBusy) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  const LaneAttachment other = Attach(Open("d"), other_);
  KeepBusy(lane);
  Submit(other, MakeChunk(1, 10));
  Submit(lane, MakeChunk(3, 20));
  Submit(other, MakeChunk(2, 30));
  gate.LetThrough(1);
  gate.AwaitStarted(3);
  EXPECT_THAT(gate.batches()[2], ElementsAre(10, 20, 30));
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 63);
  EXPECT_THAT(AnsweredSequences(3), ElementsAre(1, 2, 3));
  for (const ChunkAnswer& answer : other_->AwaitAnswers(2)) {
    float loss = 0;
    std::memcpy(&loss, answer.losses.data(), sizeof(loss));
    EXPECT_EQ(loss, answer.sequence == 1 ? 10 : 30) << "every chunk gets its own rows back";
  }
  EXPECT_EQ(other_->applied(), 2U);
  EXPECT_EQ(engine->counters().batch_chunks.sum(), 5);
  EXPECT_EQ(engine->counters().batch_chunks.bucket(0), 2U);
  EXPECT_EQ(engine->counters().batch_rows.sum(), 5);
}

TEST_F(DeviceLoopTest, ChunksThatAskTellWhatTheDeviceSaysOfTheirBatch) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    Chunk chunk = FullChunk(sequence, 1);
    chunk.received = absl::Now();
    if (sequence != 2) chunk.timing = Timing::kReport;
    Submit(lane, std::move(chunk));
    listener_->AwaitAnswers(sequence);
  }
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(3);
  ASSERT_TRUE(answers[0].times.has_value());
  EXPECT_FALSE(answers[1].times.has_value());
  ASSERT_TRUE(answers[2].times.has_value());
  for (const ChunkAnswer* answer : {&answers[0], &answers[2]}) {
    const ChunkTimes& times = *answer->times;
    EXPECT_LE(times.received, times.accepted);
    EXPECT_LE(times.accepted, times.started);
    EXPECT_LE(times.started, times.input_ready);
    EXPECT_LE(times.input_ready, times.compute_started);
    EXPECT_LE(times.compute_started, times.computed);
    EXPECT_LE(times.computed, times.output_ready);
    EXPECT_EQ(times.input_ready, times.computed) << "the fake device's";
  }
  EXPECT_FALSE(answers[0].times->earlier_done.has_value()) << "nothing came before";
  ASSERT_TRUE(answers[2].times->earlier_done.has_value());
  EXPECT_GE(*answers[2].times->earlier_done, answers[0].times->computed);
}

TEST_F(DeviceLoopTest, ThreeFullBatchesAreUnderWayAtOnceAndTheFourthWaits) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  for (uint64_t sequence = 1; sequence <= 4; ++sequence) Submit(lane, FullChunk(sequence, 1));
  gate.AwaitStarted(3);
  EXPECT_EQ(gate.batches().size(), 3U);
  EXPECT_EQ(engine->counters().queued_chunks, 1);
  gate.LetThrough(1);
  gate.AwaitStarted(4);
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 4);
}

TEST_F(DeviceLoopTest, AnAnswerLeavesWhileTheGradientIsStillBeingAddedTo) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  KeepBusy(lane);
  gate.LetAnswers(2);
  EXPECT_THAT(AnsweredSequences(2), ElementsAre(1, 2));
  EXPECT_EQ(listener_->applied(), 0U) << "nothing is in dW yet";
  EXPECT_EQ(head->Info().window_tokens, 2U) << "whoever has an answer finds its tokens counted";
  gate.LetThrough();
  engine->WaitIdle();
  EXPECT_EQ(listener_->applied(), 2U);
  EXPECT_EQ(head->Info().window_tokens, 2U);
}

TEST_F(DeviceLoopTest, RejectedChunksKeepTheirPlaceInTheLane) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  KeepBusy(lane);
  Submit(lane, BadChunk(3));
  Submit(lane, MakeChunk(4, 4));
  Submit(lane, BadChunk(5));
  Submit(lane, MakeChunk(6, 6));
  EXPECT_EQ(listener_->answers(), 0U);
  gate.LetThrough(1);
  gate.AwaitStarted(3);  // with 2 still under way
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 13);
  EXPECT_THAT(AnsweredSequences(6), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(listener_->AwaitAnswers(6)[2].disposition, Disposition::kRejected);
  EXPECT_EQ(listener_->applied(), 6U);
}

TEST_F(DeviceLoopTest, ARejectedChunkBehindAnAnsweredBatchIsAnsweredAtOnceAndAppliedInOrder) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  KeepBusy(lane);
  gate.LetAnswers(2);
  listener_->AwaitAnswers(2);
  Submit(lane, BadChunk(3));
  EXPECT_THAT(AnsweredSequences(3), ElementsAre(1, 2, 3));
  EXPECT_EQ(listener_->applied(), 0U);
  gate.LetThrough();
  engine->WaitIdle();
  EXPECT_EQ(listener_->applied(), 3U);
}

TEST_F(DeviceLoopTest, RejectedChunksThatJoinABatchUnderWayLeaveItsAnswersWhereTheDeviceWrites) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  KeepBusy(lane);
  for (uint64_t sequence = 3; sequence <= 20; ++sequence) Submit(lane, BadChunk(sequence));
  Await("the queue to be empty", [this] { return engine->counters().queued_chunks == 0; });
  gate.LetThrough();
  const std::vector<ChunkAnswer> answers = listener_->AwaitAnswers(20);
  for (size_t i = 0; i < 2; ++i) {
    float loss = 0;
    std::memcpy(&loss, answers[i].losses.data(), sizeof(loss));
    EXPECT_EQ(loss, static_cast<float>(answers[i].sequence));
  }
}

TEST_F(DeviceLoopTest, ARepeatInABatchWithOthersIsAnsweredAndDoesNotCount) {
  const std::string session = Open("c");
  const LaneAttachment other = Attach(Open("d"), other_);
  KeepBusy(Attach(session, std::make_shared<RecordingListener>()));
  const LaneAttachment again = Attach(session, listener_);
  Submit(other, MakeChunk(1, 10));
  Submit(again, MakeChunk(1, 1));
  Submit(again, MakeChunk(3, 20));
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 33);
  EXPECT_THAT(gate.batches()[2], ElementsAre(10, 1, 20));
  EXPECT_EQ(listener_->AwaitAnswers(2)[0].disposition, Disposition::kRepeated);
}

TEST_F(DeviceLoopTest, LossOnlyChunksAreNotGatheredWithOthers) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  KeepBusy(lane);
  Chunk evaluation = MakeChunk(4, 40);
  evaluation.mode = ComputeMode::kLossOnly;
  Submit(lane, MakeChunk(3, 3));
  Submit(lane, std::move(evaluation));
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 6);
  EXPECT_THAT(gate.batches()[2], ElementsAre(3));
  EXPECT_THAT(gate.batches()[3], ElementsAre(40));
}

TEST_F(DeviceLoopTest, WhatIsWithdrawnBeforeItsBatchStartsNeverReachesTheDevice) {
  const std::string session = Open("c");
  const LaneAttachment lane = Attach(session, listener_);
  const LaneAttachment other = Attach(Open("d"), other_);
  KeepBusy(lane);
  Submit(lane, MakeChunk(3, 100));
  Submit(other, MakeChunk(1, 10));
  Submit(lane, MakeChunk(4, 100));
  head->DetachLane(lane);
  EXPECT_EQ(Attach(session, listener_).marks.accepted, 2U) << "both that were started finish";
  gate.LetThrough();
  EXPECT_EQ(GradientSum(), 13);
  EXPECT_THAT(gate.batches()[2], ElementsAre(10));
  EXPECT_EQ(engine->counters().chunks_withdrawn, 2U);
  EXPECT_EQ(engine->counters().queued_chunks, 0);
}

TEST_F(DeviceLoopTest, AFlushSeesEveryChunkBeforeItAndNoneOfTheNextGeneration) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  KeepBusy(lane);
  Submit(lane, MakeChunk(3, 3));
  std::promise<absl::StatusOr<FlushInfo>> begun;
  head->BeginFlush(1, Marks(), 1.0f,
                   [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
  Chunk next = MakeChunk(4, 1000, 2);
  std::promise<void> resumed;
  gate.LetThrough();
  const absl::StatusOr<FlushInfo> flush = Await("the flush to begin", begun);
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->window_tokens, 3U);
  EXPECT_DOUBLE_EQ(flush->stats.norm, 6 * std::sqrt(static_cast<double>(kVocab * kHidden)));
  EXPECT_EQ(*head->Submit(lane, next, [&] { resumed.set_value(); }), Head::Submission::kWait);
  ASSERT_TRUE(CommitFlush(*head, flush->flush_id).ok());
  Await("a waiting lane to be resumed", resumed);
  Submit(lane, std::move(next));
  EXPECT_EQ(GradientSum(), 1000) << "the window is reset before its first chunk";
}

TEST_F(DeviceLoopTest, AHeadIsReleasedOnlyAfterItsLastBatch) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  KeepBusy(lane);
  std::atomic<bool> released = false;
  ASSERT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kYes, [&] { released = true; }).ok());
  gate.LetThrough(1);
  AnsweredSequences(1);
  EXPECT_FALSE(released);
  gate.LetThrough();
  engine->WaitIdle();
  EXPECT_TRUE(released);
  EXPECT_EQ(engine->budget().reserved(), 0);
}

TEST_F(DeviceLoopTest, ShuttingDownFinishesWhatIsUnderWayAndWhatIsQueued) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  KeepBusy(lane);
  for (uint64_t sequence = 3; sequence <= 9; ++sequence) Submit(lane, MakeChunk(sequence, 1));
  std::thread device([this] { gate.LetThrough(); });
  engine = nullptr;
  device.join();
  EXPECT_EQ(listener_->answers(), 9U);
  EXPECT_EQ(listener_->applied(), 9U);
}

class FailureTest : public DeviceLoopTest {
 protected:
  FailureTest() : DeviceLoopTest(Watched(&failures_)) {}
  static EngineOptions Watched(std::atomic<int>* failures) {
    EngineOptions options;
    options.on_device_failure = [failures](const absl::Status&) { ++*failures; };
    return options;
  }

  static inline std::atomic<int> failures_ = 0;
  void SetUp() override { failures_ = 0; }
};

TEST_F(FailureTest, AFailureEndsEveryHeadAndEveryChunkOnce) {
  const std::shared_ptr<Head> second = *engine->CreateHead({"h2", 4, 2, kernels::DataType::kFloat32});
  const std::string write = *second->BeginWrite("w", Head::Replace::kNo, "write 2");
  ASSERT_TRUE(
      (*second->FindWrite(write))->Write(0, 4, kernels::DataType::kFloat32, std::string(32, '\0')).ok());
  second->CommitWrite(write, [](const absl::StatusOr<uint64_t>&) {});
  engine->WaitIdle();
  const LaneAttachment lane = Attach(Open("c"), listener_);
  const std::string session = engine->OpenSession("h2", {"c", 0, 1})->info.session_id;
  const LaneAttachment second_lane = *second->AttachLane(session, 0, other_);
  gate.Hold();
  Submit(lane, FullChunk(1, 1));
  Chunk chunk = FullChunk(1, 1);
  ASSERT_TRUE(second->Submit(second_lane, chunk, [] {}).ok());
  gate.AwaitStarted(2);
  Submit(lane, FullChunk(2, 1));
  gate.AwaitStarted(3);
  Submit(lane, MakeChunk(3, 1));  // has no slot
  chunk = MakeChunk(2, 1);
  ASSERT_TRUE(second->Submit(second_lane, chunk, [] {}).ok());
  gate.LetAnswers(1);
  listener_->AwaitAnswers(1);
  std::promise<absl::StatusOr<FlushInfo>> begun;
  head->BeginFlush(1, Marks(), 1.0f,
                   [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
  gate.Fail();
  gate.LetThrough();
  EXPECT_EQ(Await("the flush to begin", begun).status().code(), absl::StatusCode::kInternal);
  engine->WaitIdle();
  EXPECT_EQ(failures_, 1);
  for (const auto& listener : {listener_, other_}) {
    ASSERT_TRUE(listener->ended().has_value());
    EXPECT_EQ(listener->ended()->code(), absl::StatusCode::kInternal);
  }
  EXPECT_EQ(listener_->answers(), 1U) << "answered before, and not again";
  EXPECT_EQ(other_->answers(), 0U);
  EXPECT_EQ(listener_->applied(), 0U);
  EXPECT_EQ(engine->counters().queued_chunks, 0);
  EXPECT_EQ(head->AttachLane(lane.session_id, 0, listener_).status().code(), absl::StatusCode::kInternal);
}

TEST_F(FailureTest, AFailureThatAReadMeetsEndsTheHeadToo) {
  Attach(Open("c"), listener_);
  gate.Fail();
  EXPECT_EQ(BeginFlush(1, {}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(failures_, 1);
  ASSERT_TRUE(listener_->ended().has_value());
  EXPECT_EQ(listener_->ended()->code(), absl::StatusCode::kInternal);
}

class WindowTest : public DeviceLoopTest {
 protected:
  WindowTest() : DeviceLoopTest(PatientOptions()) {}
  // Longer than any test runs: what waits for it would show as a hang.
  static EngineOptions PatientOptions() {
    EngineOptions options;
    options.batching_window = absl::Hours(1);
    return options;
  }
};

TEST_F(WindowTest, AFullBatchGoesAtOnceAndAsAWhole) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  for (uint64_t sequence = 1; sequence <= kRowsPerBatch; ++sequence) Submit(lane, MakeChunk(sequence, 1));
  EXPECT_EQ(listener_->AwaitAnswers(kRowsPerBatch).size(), static_cast<size_t>(kRowsPerBatch));
  EXPECT_THAT(gate.batches(), ElementsAre(ElementsAre(1, 1, 1, 1)));
}

TEST_F(WindowTest, AFlushAWeightReadAndAShutdownDoNotWaitForTheWindow) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 1));
  const absl::StatusOr<FlushInfo> flush = BeginFlush(1, Marks());
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->window_tokens, 1U);
  ASSERT_TRUE(AbortFlush(*head, flush->flush_id).ok());
  Submit(lane, MakeChunk(2, 1));
  std::promise<void> read;
  std::vector<float> row(kHidden);
  head->ReadWeights(0, 1, kernels::DataType::kFloat32, {row.data()},
                    [&](const absl::StatusOr<uint64_t>&) { read.set_value(); });
  Await("what is read", read);
  Submit(lane, MakeChunk(3, 1));
  engine = nullptr;
  EXPECT_EQ(listener_->answers(), 3U);
}

}  // namespace
}  // namespace lossd::engine::device_loop_test
