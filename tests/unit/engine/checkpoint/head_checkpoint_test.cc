// Checkpoints with a tag: of a head that lives on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "server/engine/common/errors.h"
#include "tests/unit/engine/checkpoint/checkpoint_fixture.h"
#include "tests/unit/engine/end_flush.h"

namespace lossd::engine::head_checkpoint_test {
namespace {

using ::testing::HasSubstr;

class HeadCheckpointTest : public CheckpointTest {
 protected:
  HeadCheckpointTest() {
    StartEngine(Start::kEmpty);
    CreateHead(WithEverything());
    WriteWeights(1);
  }
  LaneAttachment OpenPlain(const std::string& client) {
    const absl::StatusOr<OpenedSession> opened = engine_->OpenSession("h", {client, 0, 1});
    EXPECT_TRUE(opened.ok()) << opened.status();
    return Attach(opened->info.session_id);
  }
  static void ExpectError(const absl::Status& status, absl::StatusCode code, const std::string& text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
};

TEST_F(HeadCheckpointTest, ARestoredHeadIsWhatItWasAndGoesOnAsIfNothingHadBeenInBetween) {
  const LaneAttachment lane = OpenPlain("c");
  Send(lane, 1, 0, 1);
  ASSERT_TRUE(Step().ok());
  Send(lane, 2, 10, 2);
  Send(lane, 3, 20, 2);
  const absl::StatusOr<SavedCheckpoint> saved = engine_->SaveCheckpoint("h", "a");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->info.generation, 2U);
  EXPECT_EQ(saved->info.optimizer_steps, 1);
  const Content before = Look();
  Send(lane, 4, 30, 2);
  ASSERT_TRUE(Step().ok());
  const Content undisturbed = Look();
  ASSERT_NE(before.weights, undisturbed.weights);

  WriteWeights(7);
  const absl::StatusOr<CheckpointInfo> restored = engine_->RestoreCheckpoint("h", "");
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->tag, "a");
  EXPECT_EQ(Look(), before);
  // The session is known, as it was.
  const absl::StatusOr<OpenedSession> again = engine_->OpenSession("h", {"c", 0, 1});
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->info.session_id, lane.session_id);
  EXPECT_EQ(again->info.lanes[0].accepted, 3U);
  EXPECT_EQ(again->info.restores, 1U);
  Send(Attach(lane.session_id), 4, 30, 2);
  ASSERT_TRUE(Step().ok());
  EXPECT_EQ(Look(), undisturbed) << "moments and step count came back too";
}

TEST_F(HeadCheckpointTest, ARestoreEndsStreamsForgetsLaterSessionsAndTakesTheirCreditBack) {
  const LaneAttachment first = OpenPlain("c");
  Send(first, 1, 0, 1);
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  const int64_t reserved = engine_->staging_reserved();
  const LaneAttachment later = OpenPlain("later");
  Send(later, 1, 10, 1);
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  for (const auto& listener : listeners_) {
    ASSERT_TRUE(listener->ended().has_value());
    ExpectError(*listener->ended(), absl::StatusCode::kUnavailable, "restored from a checkpoint");
  }
  EXPECT_EQ(engine_->sessions(), 1);
  EXPECT_EQ(engine_->staging_reserved(), reserved);
  EXPECT_TRUE(absl::IsNotFound(engine_->FindSession(later.session_id, engine_->incarnation()).status()));
  EXPECT_TRUE(engine_->FindSession(first.session_id, engine_->incarnation()).ok());
  // What the old streams still submit counts nowhere, whoever holds the lane now.
  const LaneAttachment now = Attach(first.session_id);
  Chunk late = MakeChunk(2, 10, 10);
  EXPECT_EQ(head_->Submit(first, late, [] {}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(now.marks.accepted, 1U);
}

TEST_F(HeadCheckpointTest, AStepThatTheCheckpointHasIsNotTakenAgainByItsMarksOfBefore) {
  const LaneAttachment lane = OpenPlain("c");
  Send(lane, 1, 0, 1);
  const std::vector<SessionMarks> marks = head_->Info().window_marks;
  const absl::StatusOr<StepResult> step = StepWith(1, marks, 0.1);
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  StartEngine(Start::kKilled);
  StartEngine(Start::kKilled);
  const absl::StatusOr<StepResult> again = StepWith(1, marks, 0.1);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->step, step->step);
  EXPECT_EQ(head_->Info().optimizer_steps, 1);

  std::vector<SessionMarks> others = marks;
  others[0].past.restores = 7;
  ExpectError(StepWith(1, others, 0.1).status(), absl::StatusCode::kAborted,
              "was restored from a checkpoint");
}

TEST_F(HeadCheckpointTest, MarksAreKnownBehindRestoresAndADrainAsFarAsTheCheckpointHasThem) {
  const LaneAttachment lane = OpenPlain("c");
  Send(lane, 1, 0, 1);
  const std::vector<SessionMarks> saved = head_->Info().window_marks;
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  Send(lane, 2, 10, 1);
  std::vector<SessionMarks> beyond = head_->Info().window_marks;
  StartEngine(Start::kKilled);
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "b").ok());
  StartEngine(Start::kKilled);
  ASSERT_TRUE(engine_->SaveForDrain().ok());
  StartEngine(Start::kDrained);
  // The session comes to the same numbers once more.
  Send(Attach(lane.session_id), 2, 20, 1);
  const absl::Status refused = StepWith(1, beyond, 0.1).status();
  ExpectError(refused, absl::StatusCode::kAborted, "was restored from a checkpoint");
  EXPECT_EQ(PositionOf(refused)->restores, 2U);
  ExpectError(StepWith(1, saved, 0.1).status(), absl::StatusCode::kFailedPrecondition,
              "marks name accepted 1");
  beyond[0].past = head_->Info().window_marks[0].past;
  EXPECT_TRUE(StepWith(1, beyond, 0.1).ok());
}

// A trainer pairs the checkpoint with a state of its own.
TEST_F(HeadCheckpointTest, WhoNamesMarksHasThemSavedAndNothingElse) {
  const LaneAttachment lane = OpenPlain("c");
  Send(lane, 1, 0, 1);
  const std::vector<SessionMarks> first = head_->Info().window_marks;
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a", {.marks = first}).ok());
  Send(lane, 2, 10, 1);
  const std::vector<SessionMarks> both = head_->Info().window_marks;
  ExpectError(engine_->SaveCheckpoint("h", "b", {.marks = first}).status(),
              absl::StatusCode::kFailedPrecondition, "the server has accepted 2");
  const LaneAttachment other = OpenPlain("d");
  Send(other, 1, 20, 1);
  ExpectError(engine_->SaveCheckpoint("h", "b", {.marks = both}).status(),
              absl::StatusCode::kFailedPrecondition, other.session_id);
  StartEngine(Start::kKilled);  // from the first
  ExpectError(engine_->SaveCheckpoint("h", "b", {.marks = both}).status(), absl::StatusCode::kAborted,
              "was restored from a checkpoint");
  EXPECT_TRUE(engine_->SaveCheckpoint("h", "b", {.marks = first}).ok());
}

TEST_F(HeadCheckpointTest, WeightVersionsAreNeverGivenTwice) {
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());  // version 1
  WriteWeights(2);
  WriteWeights(3);
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  EXPECT_EQ(head_->weight_version(), 4U);
  StartEngine(Start::kKilled);
  const uint64_t first = head_->weight_version();
  EXPECT_GT(first, uint64_t{1} << 20) << "the lost server may have published many";
  WriteWeights(4);
  StartEngine(Start::kKilled);  // with the same checkpoint
  EXPECT_GT(head_->weight_version(), first + 1);
  EXPECT_EQ(head_->restores(), 3U);
}

TEST_F(HeadCheckpointTest, AHeadThatIsDeletedAndRestoredAgainHasNumbersThatItNeverHad) {
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  std::set<uint64_t> versions = {head_->weight_version()};
  std::set<uint64_t> restores = {head_->restores()};
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(engine_->DeleteHead("h", Head::DiscardGradient::kYes).ok());
    ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
    head_ = *engine_->FindHead("h");
    EXPECT_TRUE(versions.insert(head_->weight_version()).second);
    EXPECT_TRUE(restores.insert(head_->restores()).second);
    WriteWeights(2);
    EXPECT_TRUE(versions.insert(head_->weight_version()).second);
  }
}

TEST_F(HeadCheckpointTest, OnlyWhatHasChangedIsWritten) {
  const LaneAttachment lane = OpenPlain("c");
  Send(lane, 1, 0, 1);
  const int64_t state = kVocab * kHidden * 4 * 3 + kVocab * 4 * 3;  // master, two moments; of the bias too
  const int64_t gradient = kVocab * kHidden * 4 + kVocab * 4;
  const auto written = [&](const std::string& tag) {
    return engine_->SaveCheckpoint("h", tag)->bytes_written;
  };
  EXPECT_GT(written("a"), state + gradient);
  const int64_t manifest = written("b");
  EXPECT_LT(manifest, gradient) << "nothing has changed";
  Send(lane, 2, 10, 1);
  const int64_t after_chunk = written("c");
  EXPECT_GE(after_chunk, gradient);
  EXPECT_LT(after_chunk, state);
  ASSERT_TRUE(Step().ok());
  const int64_t after_step = written("d");
  EXPECT_GE(after_step, state);
  EXPECT_LT(after_step - manifest, state + gradient) << "an empty window has no gradient";
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "c").ok());
  EXPECT_LT(written("e"), state) << "what was restored is on the disk";
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "e").ok());
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
}

TEST_F(HeadCheckpointTest, WhatCannotBeRestoredChangesNothing) {
  const LaneAttachment lane = OpenPlain("c");
  Send(lane, 1, 0, 1);
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  Send(lane, 2, 10, 1);
  const Content before = Look();
  const auto path = folder_ / "heads/h/a/tensor.exp_avg";
  std::string content = CheckpointFolder::Read(path);
  content[100] = static_cast<char>(content[100] ^ 1);
  CheckpointFolder::Write(path, content);
  ExpectError(engine_->RestoreCheckpoint("h", "a").status(), absl::StatusCode::kDataLoss, "tensor.exp_avg");
  ExpectError(engine_->RestoreCheckpoint("h", "b").status(), absl::StatusCode::kNotFound, "'b'");
  ExpectError(engine_->RestoreCheckpoint("h", ".drain").status(), absl::StatusCode::kInvalidArgument, "tag");
  EXPECT_EQ(Look(), before);
  EXPECT_FALSE(listeners_[0]->ended().has_value());
  Send(lane, 3, 20, 1);
}

TEST_F(HeadCheckpointTest, ACheckpointOfAnotherShapeOrConfigurationIsRefused) {
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  const auto recreate = [&](auto change) {
    ASSERT_TRUE(engine_->DeleteHead("h", Head::DiscardGradient::kYes).ok());
    HeadConfig config = WithEverything();
    change(config);
    CreateHead(config);
    ExpectError(engine_->RestoreCheckpoint("h", "a").status(), absl::StatusCode::kFailedPrecondition,
                "another configuration");
    EXPECT_EQ(head_->weight_version(), 0U);
  };
  recreate([](HeadConfig& config) { config.vocab_size = 51; });
  recreate([](HeadConfig& config) { config.hidden_size = 17; });
  recreate([](HeadConfig& config) { config.bias = false; });
  recreate([](HeadConfig& config) { config.optimizer.beta1 = 0.8; });
  recreate([](HeadConfig& config) {
    config.class_weights = std::make_shared<const std::vector<float>>(kVocab, 1.0f);
  });
}

TEST_F(HeadCheckpointTest, AHeadThatIsNotThereIsCreated) {
  Send(OpenPlain("c"), 1, 0, 1);
  const Content before = Look();
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  ASSERT_TRUE(engine_->DeleteHead("h", Head::DiscardGradient::kYes).ok());
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  head_ = *engine_->FindHead("h");
  EXPECT_EQ(Look(), before);
}

TEST_F(HeadCheckpointTest, ADeletedHeadStaysDeletedWhenTheServerStartsAgain) {
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  ASSERT_TRUE(engine_->DeleteHead("h", Head::DiscardGradient::kYes).ok());
  StartEngine(Start::kKilled);
  ASSERT_TRUE(restored_.ok()) << restored_.status();
  EXPECT_TRUE(restored_->empty());
  EXPECT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  StartEngine(Start::kKilled);
  EXPECT_EQ(restored_->size(), 1U) << "it was live again";
}

TEST_F(HeadCheckpointTest, AHeadThatIsNotDeletedAfterAllStaysLive) {
  Send(OpenPlain("c"), 1, 0, 1);
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  ExpectError(engine_->DeleteHead("h", Head::DiscardGradient::kNo), absl::StatusCode::kFailedPrecondition,
              "discard_gradient");
  // Nothing can be written there, so that the start after a deletion would bring the head back.
  std::filesystem::rename(folder_ / "heads/h", folder_ / "aside");
  CheckpointFolder::Write(folder_ / "heads/h", "no folder");
  ExpectError(engine_->DeleteHead("h", Head::DiscardGradient::kYes), absl::StatusCode::kInternal, "heads/h");
  EXPECT_TRUE(engine_->FindHead("h").ok());
  std::filesystem::remove(folder_ / "heads/h");
  std::filesystem::rename(folder_ / "aside", folder_ / "heads/h");
  StartEngine(Start::kKilled);
  EXPECT_EQ(restored_->size(), 1U);
}

TEST_F(HeadCheckpointTest, ASealedWindowIsNotSavedUnderATagAndARestoreReopensIt) {
  Send(OpenPlain("c"), 1, 0, 1);
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  const Content before = Look();
  const absl::StatusOr<FlushInfo> flush = BeginFlush();
  ASSERT_TRUE(flush.ok());
  ExpectError(engine_->SaveCheckpoint("h", "b").status(), absl::StatusCode::kFailedPrecondition, "sealed");
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  EXPECT_TRUE(absl::IsAborted(CommitFlush(*head_, flush->flush_id).status())) << "the flush is over";
  EXPECT_EQ(Look(), before);
}

TEST_F(HeadCheckpointTest, WithoutAFolderCallsSayWhatIsMissing) {
  Create({});
  ExpectError(engine_->SaveCheckpoint("h", "a").status(), absl::StatusCode::kFailedPrecondition,
              "--checkpoint_dir");
  ExpectError(engine_->RestoreCheckpoint("h", "a").status(), absl::StatusCode::kFailedPrecondition,
              "--checkpoint_dir");
  ExpectError(engine_->ListCheckpoints("").status(), absl::StatusCode::kFailedPrecondition,
              "--checkpoint_dir");
}

// Deterministic sessions: their own gradients, and what their unfinished tiles hold.
TEST_F(HeadCheckpointTest, ADeterministicSessionComesBackBitForBitAndSavingLeavesItsTilesAlone) {
  const std::string session = Open("d", 3);
  const LaneAttachment lane = Attach(session);
  Send(lane, 1, 0, 1);
  Send(lane, 2, 10, 1);  // the first tile is complete, four tokens wait
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  Send(lane, 3, 20, 1);
  Send(lane, 4, 30, 1);
  const std::vector<float> undisturbed = Flush();
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  const LaneAttachment again = Attach(session);
  EXPECT_EQ(again.marks.accepted, 2U);
  Chunk taken = MakeChunk(3, 10, 10);
  EXPECT_EQ(AnswerOf(again, std::move(taken)).disposition, Disposition::kRejected) << "its places are taken";
  Send(again, 4, 20, 1);
  Send(again, 5, 30, 1);
  EXPECT_TRUE(SameBits(Flush(), undisturbed));
  // A second restore finds no memory but what the session has.
  ASSERT_TRUE(engine_->CloseSession(session).ok());
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  EXPECT_EQ(Attach(session).marks.accepted, 2U);
}

TEST_F(HeadCheckpointTest, ListsInTilesComeBackBitForBitWithMemoryForThem) {
  const std::string session = Open("d", 3);
  const auto send = [this](const LaneAttachment& of, uint64_t sequence, int64_t place, int64_t end,
                           int64_t most) {
    while (place < end) {
      const int64_t last = std::min({place + most, EndOfLists(place), end});
      Submit(of, Listed(sequence++, place, last - place));
      place = last;
    }
    return sequence;
  };
  // What waits: kept tokens of the second and third tile, and both kinds of soft targets.
  const LaneAttachment lane = Attach(session);
  uint64_t next = send(lane, 1, 0, 29, 16);
  next = send(lane, next, 35, 80, 16);
  const uint64_t sent = next - 1;
  engine_->WaitIdle();
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  next = send(lane, next, 29, 35, 6);
  send(lane, next, 80, kTokens, 16);
  engine_->WaitIdle();
  const int64_t reserved = engine_->budget().reserved();
  const std::vector<float> undisturbed = Flush();

  for (const Start start : {Start::kEmpty, Start::kKilled}) {
    SCOPED_TRACE(start == Start::kKilled ? "by a new server" : "at once");
    if (start == Start::kKilled) StartEngine(start);
    ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
    EXPECT_EQ(engine_->budget().reserved(), reserved);
    const LaneAttachment again = Attach(session);
    ASSERT_EQ(again.marks.accepted, sent);
    next = send(again, sent + 1, 29, 35, 2);
    send(again, next, 80, kTokens, 7);
    engine_->WaitIdle();
    EXPECT_EQ(engine_->counters().chunks_rejected, 0U);
    EXPECT_TRUE(SameBits(Flush(), undisturbed));
  }
  memory_limit_bytes_ = reserved - 1;
  StartEngine(Start::kKilled);
  ExpectError(restored_.status(), absl::StatusCode::kResourceExhausted, "lists of tokens in a deterministic");
  EXPECT_TRUE(engine_->Heads().empty()) << "nothing half restored stays";
}

// A checkpoint is of one head, and a teacher is another one.
TEST_F(HeadCheckpointTest, ASaveClosesTilesWithSoftTargetsSoThatNothingInItNeedsTheTeacher) {
  const auto teach = [this](float scale) {
    const std::shared_ptr<Head> own = std::exchange(head_, *engine_->FindHead("teacher"));
    WriteWeights(scale);
    head_ = own;
  };
  const auto taught = [](uint64_t sequence, int64_t place, uint64_t generation) {
    Chunk chunk = MakeChunk(sequence, place, 10, generation);
    chunk.options.distillation = ChunkDistillation{.teacher = "teacher"};
    chunk.teacher_hidden = chunk.hidden_states;
    return chunk;
  };
  HeadConfig teacher = head_->config();
  teacher.name = "teacher";
  ASSERT_TRUE(engine_->CreateHead(teacher).ok());
  teach(3);
  const LaneAttachment lane = Attach(Open("d", 3));
  Submit(lane, taught(1, 0, 1));
  Send(lane, 2, 100, 1);  // in a tile of its own, which is left alone
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  const Content undisturbed = Look();
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  teach(7);
  EXPECT_EQ(Look().gradient, undisturbed.gradient) << "of the weights that the teacher had";
  ASSERT_TRUE(engine_->DeleteHead("teacher", Engine::DiscardGradient::kYes).ok());
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "a").ok());
  EXPECT_EQ(Look().gradient, undisturbed.gradient);
}

TEST_F(HeadCheckpointTest, TilesOfAnotherSizeAreRefused) {
  Send(Attach(Open("d", 3)), 1, 0, 1);
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  StartEngine(Start::kKilled, 8);
  ExpectError(restored_.status(), absl::StatusCode::kFailedPrecondition, "--max_chunk_tokens");
  EXPECT_TRUE(engine_->Heads().empty()) << "nothing half restored stays";
  StartEngine(Start::kKilled);
  ASSERT_TRUE(restored_.ok()) << restored_.status();
  EXPECT_EQ(restored_->size(), 1U) << "a restore that failed deletes no head";
}

}  // namespace
}  // namespace lossd::engine::head_checkpoint_test
