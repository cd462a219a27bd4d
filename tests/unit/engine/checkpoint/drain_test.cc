// A server that is drained or killed, and the one after it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/checkpoint/checkpoint_fixture.h"
#include "tests/unit/engine/end_flush.h"

namespace lossd::engine::drain_test {
namespace {

using ::testing::HasSubstr;

class DrainTest : public CheckpointTest {
 protected:
  // The end of one engine and the start of the next.
  void DrainAndGoOn() {
    engine_->BeginDrain();
    engine_->WaitIdle();
    const absl::StatusOr<DrainedHeads> heads = engine_->SaveForDrain();
    ASSERT_TRUE(heads.ok()) << heads.status();
    for (const auto& [head, status] : heads->failed) ADD_FAILURE() << head << ": " << status;
    StartEngine(Start::kDrained);
    ASSERT_TRUE(restored_.ok()) << restored_.status();
    ASSERT_TRUE(store_->ConsumeDrain().ok());
  }
};

// One window of two sessions, one of them deterministic, and a step; `between` is called at each gap.
TEST_F(DrainTest, DrainedAtAnyPointItEndsAsIfItNeverWas) {
  const auto run = [this](int drain_at) {
    StopEngine();
    folder_.Clear();
    StartEngine(Start::kEmpty);
    CreateHead(WithEverything());
    WriteWeights(1);
    const std::string incarnation = engine_->incarnation();
    const std::string session = Open("d", 3);
    const std::string plain = engine_->OpenSession("h", {"c", 0, 1})->info.session_id;
    int point = 0;
    uint64_t sequence = 1;
    for (uint64_t generation = 1; generation <= 2; ++generation) {
      LaneAttachment lane = Attach(session);
      LaneAttachment other = Attach(plain);
      for (int64_t place = 0; place < 40; place += 10) {
        if (++point == drain_at) {
          DrainAndGoOn();
          EXPECT_EQ(engine_->incarnation(), incarnation);
          EXPECT_EQ(head_->restores(), 0U);
          EXPECT_EQ(engine_->sessions(), 2);
          lane = Attach(session);
          other = Attach(plain);
          EXPECT_EQ(lane.marks.accepted, sequence - 1);
          EXPECT_EQ(lane.marks.applied, sequence - 1);
          EXPECT_EQ(lane.generation, generation);
        }
        Send(lane, sequence, place, generation);
        Send(other, sequence++, place + 1, generation);
      }
      if (++point == drain_at) DrainAndGoOn();
      EXPECT_TRUE(Step().ok());
    }
    LaneAttachment lane = Attach(session);
    Send(lane, sequence, 0, 3);
    return Look();
  };
  const Content undisturbed = run(0);
  for (int drain_at = 1; drain_at <= 10; ++drain_at) EXPECT_EQ(run(drain_at), undisturbed) << drain_at;
}

TEST_F(DrainTest, AFlushGoesOnWhereverItStood) {
  StartEngine(Start::kEmpty);
  CreateHead(WithEverything());
  WriteWeights(1);
  const std::string session = engine_->OpenSession("h", {"c", 0, 1})->info.session_id;
  Send(Attach(session), 1, 0, 1);
  const absl::StatusOr<FlushInfo> flush = BeginFlush();
  ASSERT_TRUE(flush.ok());
  const std::vector<float> gradient = Read(*flush);
  DrainAndGoOn();
  EXPECT_EQ(head_->Info().window_state, WindowState::kSealed);
  EXPECT_EQ(Read(*flush), gradient);
  const absl::StatusOr<FlushInfo> again = BeginFlush();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->flush_id, flush->flush_id);
  EXPECT_EQ(again->stats.norm, flush->stats.norm);
  EXPECT_EQ(again->stats.bias_norm, flush->stats.bias_norm);
  EXPECT_EQ(again->stats.largest, flush->stats.largest);
  EXPECT_EQ(*CommitFlush(*head_, flush->flush_id), 2U);
  DrainAndGoOn();
  EXPECT_EQ(*CommitFlush(*head_, flush->flush_id), 2U) << "a repeated commit answers the same";
  Send(Attach(session), 2, 0, 2);
}

TEST_F(DrainTest, BothGradientsOfASealedWindowAreKept) {
  enum class End { kCommitted, kAborted, kKilled };
  const auto run = [this](End end, bool drains) {
    StartEngine(Start::kEmpty);
    HeadConfig config = WithEverything();
    config.double_buffer = true;
    CreateHead(config);
    WriteWeights(1);
    const LaneAttachment lane = Attach(engine_->OpenSession("h", {"c", 0, 1})->info.session_id);
    Send(lane, 1, 0, 1);
    EXPECT_TRUE(CommitFlush(*head_, BeginFlush()->flush_id).ok());  // the buffers change places
    Send(lane, 2, 10, 2);
    const absl::StatusOr<FlushInfo> flush = BeginFlush();
    Send(lane, 3, 20, 3);
    if (drains) DrainAndGoOn();
    if (end == End::kCommitted) {
      EXPECT_EQ(*CommitFlush(*head_, flush->flush_id), 3U);
    } else if (end == End::kAborted) {
      EXPECT_EQ(*AbortFlush(*head_, flush->flush_id), 2U);
    } else {
      StartEngine(Start::kKilled);  // nobody knows of the flush any more
      EXPECT_EQ(head_->Info().window_state, WindowState::kOpen);
    }
    return Look();
  };
  EXPECT_EQ(run(End::kCommitted, true), run(End::kCommitted, false));
  const Content aborted = run(End::kAborted, false);
  EXPECT_EQ(run(End::kAborted, true), aborted);
  EXPECT_EQ(run(End::kKilled, true), aborted);
}

TEST_F(DrainTest, AWindowThatIsReopenedIsAsOldAsWhatTheNextOneHeld) {
  StartEngine(Start::kEmpty);
  HeadConfig config = WithEverything();
  config.double_buffer = true;
  CreateHead(config);
  WriteWeights(1);
  const LaneAttachment lane = Attach(engine_->OpenSession("h", {"c", 0, 1})->info.session_id);
  ASSERT_TRUE(BeginFlush().ok()) << "of a window that is empty";
  Send(lane, 1, 0, 2);
  DrainAndGoOn();
  EXPECT_FALSE(head_->Snapshot().window_since.has_value());
  StartEngine(Start::kKilled);  // nobody knows of the flush any more
  EXPECT_GT(head_->Snapshot().window_tokens, 0U);
  EXPECT_TRUE(head_->Snapshot().window_since.has_value());
  ASSERT_TRUE(CommitFlush(*head_, BeginFlush()->flush_id).ok());
  EXPECT_FALSE(head_->Snapshot().window_since.has_value()) << "nothing came for this one";
}

TEST_F(DrainTest, AStepThatWasTakenAnswersTheSameAndIsNotTakenAgain) {
  StartEngine(Start::kEmpty);
  CreateHead(WithEverything());
  WriteWeights(1);
  Send(Attach(engine_->OpenSession("h", {"c", 0, 1})->info.session_id), 1, 0, 1);
  engine_->WaitIdle();
  const std::vector<SessionMarks> marks = head_->Info().window_marks;
  const absl::StatusOr<StepResult> step = StepWith(1, marks, 0.1);
  ASSERT_TRUE(step.ok()) << step.status();
  const std::vector<float> weights = Weights();
  DrainAndGoOn();
  const absl::StatusOr<StepResult> again = StepWith(1, marks, 0.1);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->weight_version, step->weight_version);
  EXPECT_EQ(again->stats.norm, step->stats.norm);
  EXPECT_EQ(StepWith(1, marks, 0.2).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Weights(), weights);
}

TEST_F(DrainTest, AfterAKillTheNewestCheckpointIsThereUnderAnotherIncarnation) {
  StartEngine(Start::kEmpty);
  CreateHead(WithEverything());
  WriteWeights(1);
  const std::string incarnation = engine_->incarnation();
  const std::string session = engine_->OpenSession("h", {"c", 0, 2})->info.session_id;
  const LaneAttachment lane = Attach(session, 1);
  Send(lane, 1, 0, 1);
  Send(lane, 2, 10, 1);
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "old").ok());
  Send(lane, 3, 20, 1);
  const Content saved = Look();
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "new").ok());
  Send(lane, 4, 30, 1);
  StartEngine(Start::kKilled);
  ASSERT_TRUE(restored_.ok()) << restored_.status();
  EXPECT_EQ(restored_->at(0).tag, "new");
  EXPECT_NE(engine_->incarnation(), incarnation);
  EXPECT_EQ(Look(), saved);
  const absl::StatusOr<OpenedSession> again = engine_->OpenSession("h", {"c", 0, 2});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->info.session_id, session);
  EXPECT_EQ(again->info.lanes[1].accepted, 3U);
  EXPECT_EQ(again->info.restores, 1U);
  // Who replays the window under another name does not get it counted twice: the flush must name both.
  const std::string naive = engine_->OpenSession("h", {"naive", 0, 1})->info.session_id;
  const LaneAttachment replay = Attach(naive);
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) Send(replay, sequence, 0, 1);
  std::promise<absl::Status> refused;
  head_->BeginFlush(1, {{naive, {{0, 3, 0}}}}, 1.0f,
                    [&](const absl::StatusOr<FlushInfo>& flush) { refused.set_value(flush.status()); });
  const absl::Status status = testing::Await("the refusal", refused);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr(session));
}

TEST_F(DrainTest, AConsumedDrainIsStillTheNewestCheckpointAfterAKill) {
  StartEngine(Start::kEmpty);
  CreateHead(WithEverything());
  WriteWeights(1);
  Send(Attach(engine_->OpenSession("h", {"c", 0, 1})->info.session_id), 1, 0, 1);
  const Content before = Look();
  DrainAndGoOn();
  const std::string incarnation = engine_->incarnation();
  WriteWeights(2);
  StartEngine(Start::kKilled);
  ASSERT_TRUE(restored_.ok()) << restored_.status();
  EXPECT_EQ(Look(), before);
  EXPECT_NE(engine_->incarnation(), incarnation);
}

TEST_F(DrainTest, HeadsWithoutWeightsLeaveNothingBehind) {
  StartEngine(Start::kEmpty);
  CreateHead(WithEverything());
  const absl::StatusOr<DrainedHeads> heads = engine_->SaveForDrain();
  ASSERT_TRUE(heads.ok()) << heads.status();
  EXPECT_TRUE(heads->saved.empty());
  const absl::StatusOr<std::optional<DrainRecord>> read = store_->ReadDrain();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_FALSE(read->has_value());
}

TEST_F(DrainTest, ADrainCheckpointThatIsNotTheOneTheRecordNamesIsRefused) {
  StartEngine(Start::kEmpty);
  CreateHead(WithEverything());
  WriteWeights(1);
  ASSERT_TRUE(engine_->SaveForDrain().ok());
  const absl::StatusOr<std::optional<DrainRecord>> read = store_->ReadDrain();
  ASSERT_TRUE(read.ok() && read->has_value()) << read.status();
  DrainRecord record = **read;
  ++record.heads.at("h");
  ASSERT_TRUE(store_->WriteDrain(record).ok());
  StartEngine(Start::kDrained);
  EXPECT_EQ(restored_.status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(DrainTest, AHeadThatCannotBeSavedKeepsNoOtherFromItAndGoesBackToItsNewestCheckpoint) {
  StartEngine(Start::kEmpty);
  HeadConfig broken = WithEverything();
  broken.name = "broken";
  CreateHead(broken);
  WriteWeights(1);
  ASSERT_TRUE(engine_->SaveCheckpoint("broken", "a").ok());
  CreateHead(WithEverything());
  WriteWeights(1);
  Send(Attach(engine_->OpenSession("h", {"c", 0, 1})->info.session_id), 1, 0, 1);
  const Content before = Look();
  std::filesystem::rename(folder_ / "heads/broken", folder_ / "aside");
  CheckpointFolder::Write(folder_ / "heads/broken", "no folder");
  engine_->BeginDrain();
  engine_->WaitIdle();
  const absl::StatusOr<DrainedHeads> heads = engine_->SaveForDrain();
  ASSERT_TRUE(heads.ok()) << heads.status();
  ASSERT_EQ(heads->saved.size(), 1U);
  EXPECT_EQ(heads->saved[0].info.head, "h");
  ASSERT_EQ(heads->failed.size(), 1U);
  EXPECT_THAT(std::string(heads->failed.at("broken").message()), HasSubstr("heads/broken"));
  std::filesystem::remove(folder_ / "heads/broken");
  std::filesystem::rename(folder_ / "aside", folder_ / "heads/broken");
  StartEngine(Start::kDrained);
  ASSERT_TRUE(restored_.ok()) << restored_.status();
  EXPECT_EQ(Look(), before);
  EXPECT_EQ(head_->restores(), 0U);
  ASSERT_TRUE(engine_->FindHead("broken").ok());
  EXPECT_EQ((*engine_->FindHead("broken"))->restores(), 1U);
}

TEST_F(DrainTest, NothingEndsAWindowWhileTheServerDrains) {
  StartEngine(Start::kEmpty);
  CreateHead(WithEverything());
  WriteWeights(1);
  Send(Attach(engine_->OpenSession("h", {"c", 0, 1})->info.session_id), 1, 0, 1);
  const Content before = Look();
  engine_->BeginDrain();
  EXPECT_EQ(BeginFlush().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Step().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->RestoreCheckpoint("h", "").status().code(), absl::StatusCode::kUnavailable);
  DrainAndGoOn();
  EXPECT_EQ(Look(), before);
}

}  // namespace
}  // namespace lossd::engine::drain_test
