// Calls that end a window while a checkpoint is about to take its place.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/checkpoint/checkpoint_store.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::restoring_test {
namespace {

EngineOptions WithCheckpoints(const CheckpointFolder& folder, std::atomic<int>* device_failures) {
  EngineOptions options;
  options.on_device_failure = [device_failures](const absl::Status&) { ++*device_failures; };
  options.checkpoints = *CheckpointStore::Open(folder.path());
  return options;
}

HeadConfig WithOptimizer() {
  HeadConfig config;
  config.optimizer.kind = OptimizerKind::kSgd;
  config.double_buffer = true;
  return config;
}

class RestoringTest : public ::testing::Test {
 protected:
  RestoringTest() {
    lane_ = fixture_.Attach(fixture_.Open("c"), listener_);
    fixture_.Submit(lane_, EngineFixture::MakeChunk(1, 5));
    fixture_.engine->WaitIdle();
    const auto saved = fixture_.engine->SaveCheckpoint("h", "a");
    EXPECT_TRUE(saved.ok()) << saved.status();
  }

  // With `during` in its middle. The head is what it was, and lives.
  void Restore(std::function<void()> during) {
    fixture_.gate.OnWriteState(std::move(during));
    const auto restored = fixture_.engine->RestoreCheckpoint("h", "a");
    ASSERT_TRUE(restored.ok()) << restored.status();
    fixture_.engine->WaitIdle();
    const HeadInfo info = fixture_.head->Info();
    EXPECT_EQ(info.generation, 1U);
    EXPECT_EQ(info.window_state, WindowState::kOpen);
    EXPECT_EQ(info.window_tokens, 1U);
    EXPECT_EQ(info.optimizer_steps, 0);
    EXPECT_EQ(fixture_.Weight(), 0);
    EXPECT_EQ(fixture_.GradientSum(), 5);
    ASSERT_TRUE(fixture_.ApplyStep(1, fixture_.Marks(), {.learning_rate = 1}).ok());
    EXPECT_EQ(fixture_.Weight(), -5);
  }

  CheckpointFolder folder_;
  std::atomic<int> device_failures_ = 0;
  EngineFixture fixture_{WithCheckpoints(folder_, &device_failures_), {}, WithOptimizer()};
  std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
  LaneAttachment lane_;
};

TEST_F(RestoringTest, AStepMeanwhileIsTurnedAway) {
  absl::Status step;
  const std::vector<SessionMarks> marks = fixture_.Marks();
  Restore([&] {
    fixture_.head->ApplyStep(1, marks, {.learning_rate = 1},
                             [&](const absl::StatusOr<StepResult>& answer) { step = answer.status(); });
  });
  EXPECT_EQ(step.code(), absl::StatusCode::kUnavailable) << step;
}

TEST_F(RestoringTest, AFlushMeanwhileIsTurnedAway) {
  absl::Status flush;
  const std::vector<SessionMarks> marks = fixture_.Marks();
  Restore([&] {
    fixture_.head->BeginFlush(1, marks, 1,
                              [&](const absl::StatusOr<FlushInfo>& answer) { flush = answer.status(); });
  });
  EXPECT_EQ(flush.code(), absl::StatusCode::kUnavailable) << flush;
}

TEST_F(RestoringTest, TheEndOfAFlushMeanwhileIsTurnedAwayAndTouchesNoGradient) {
  const std::string flush = fixture_.BeginFlush(1, fixture_.Marks())->flush_id;
  absl::Status committed;
  absl::Status aborted;
  Restore([&] {
    committed = CommitFlush(*fixture_.head, flush).status();
    aborted = AbortFlush(*fixture_.head, flush).status();
  });
  EXPECT_EQ(committed.code(), absl::StatusCode::kUnavailable) << committed;
  EXPECT_EQ(aborted.code(), absl::StatusCode::kUnavailable) << aborted;
}

TEST_F(RestoringTest, ADeterministicSessionThatIsClosedMeanwhileComesBack) {
  const auto opened = fixture_.engine->OpenSession("h", {"d", 1, 1, Deterministic::kYes});
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::string session = opened->info.session_id;
  ASSERT_TRUE(fixture_.engine->SaveCheckpoint("h", "b").ok());
  fixture_.gate.OnWriteState([&] { EXPECT_TRUE(fixture_.engine->CloseSession(session).ok()); });
  const auto restored = fixture_.engine->RestoreCheckpoint("h", "b");
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(fixture_.head->deterministic_sessions(), 1);
  EXPECT_TRUE(fixture_.engine->CloseSession(session).ok());
}

// A write of every row, and what became of its commit.
class RestoredWriteTest : public RestoringTest {
 protected:
  std::string BeginWhole(const std::string& key) {
    const absl::StatusOr<std::string> id = fixture_.head->BeginWrite(key, Head::Replace::kNo, "id of " + key);
    EXPECT_TRUE(id.ok()) << id.status();
    const std::vector<float> ones(EngineFixture::kVocab * EngineFixture::kHidden, 1);
    const absl::string_view bytes(reinterpret_cast<const char*>(ones.data()), ones.size() * sizeof(float));
    EXPECT_TRUE((*fixture_.head->FindWrite(*id))
                    ->Write(0, EngineFixture::kVocab, kernels::DataType::kFloat32, bytes)
                    .ok());
    return *id;
  }
  void Commit(const std::string& id) {
    fixture_.head->CommitWrite(id, [this](const absl::StatusOr<uint64_t>& version) { version_ = version; });
  }
  absl::StatusOr<uint64_t> version_ = absl::UnknownError("no answer");
};

// The commit was accepted, and only waited for the device, which was busy with the restore.
TEST_F(RestoredWriteTest, ACommitThatWaitsForTheRestoreIsAborted) {
  const std::string id = BeginWhole("w");
  Restore([&] { Commit(id); });
  EXPECT_EQ(version_.status().code(), absl::StatusCode::kAborted) << version_.status();
  const std::string next = BeginWhole("next");
  Commit(next);
  fixture_.engine->WaitIdle();
  EXPECT_TRUE(version_.ok()) << version_.status();
  EXPECT_EQ(fixture_.Weight(), 1);
}

TEST_F(RestoredWriteTest, AWriteThatIsBegunMeanwhileIsUndone) {
  std::string id;
  Restore([&] { id = BeginWhole("w"); });
  Commit(id);
  EXPECT_EQ(version_.status().code(), absl::StatusCode::kAborted) << version_.status();
  EXPECT_EQ(fixture_.Weight(), -5) << "the step behind the restore";
}

TEST_F(RestoredWriteTest, ARepeatedCommitOfWhatTheRestoreUndidIsAborted) {
  const std::string id = BeginWhole("w");
  Commit(id);
  fixture_.engine->WaitIdle();
  ASSERT_TRUE(version_.ok()) << version_.status();
  Restore([] {});
  Commit(id);
  EXPECT_EQ(version_.status().code(), absl::StatusCode::kAborted) << version_.status();
}

TEST_F(RestoredWriteTest, AWriteSurvivesARestoreThatChangesNothing) {
  const std::string id = BeginWhole("w");
  EXPECT_FALSE(fixture_.engine->RestoreCheckpoint("h", "nowhere").ok());
  Commit(id);
  fixture_.engine->WaitIdle();
  EXPECT_TRUE(version_.ok()) << version_.status();
}

TEST_F(RestoringTest, ADeviceThatFailsMeanwhileEndsTheServer) {
  fixture_.gate.OnWriteState([this] { fixture_.gate.Fail(); });
  const absl::Status restored = fixture_.engine->RestoreCheckpoint("h", "a").status();
  EXPECT_EQ(restored.code(), absl::StatusCode::kInternal) << restored;
  EXPECT_EQ(device_failures_, 1);
}

TEST_F(RestoringTest, ADiskThatFailsMeanwhileIsNoFailureOfTheDevice) {
  // Behind the verification; the reader has the file open, and finds it at its end.
  fixture_.gate.OnWriteState(
      [this] { std::filesystem::resize_file(folder_ / "heads/h/a" / kOwnGradient, 0); });
  const absl::Status restored = fixture_.engine->RestoreCheckpoint("h", "a").status();
  EXPECT_EQ(restored.code(), absl::StatusCode::kDataLoss) << restored;
  EXPECT_EQ(device_failures_, 0);
  EXPECT_TRUE(absl::IsDataLoss(CommitFlush(*fixture_.head, "f").status()))
      << "half of it is the checkpoint's";
}

// An abort gives the window what the next one took, and the device adds it only behind a save that was asked
// for sooner.
TEST_F(RestoringTest, ASaveWaitsForTheGradientsOfAnAbortedFlush) {
  const std::string flush = fixture_.BeginFlush(1, fixture_.Marks())->flush_id;
  fixture_.Submit(lane_, EngineFixture::MakeChunk(2, 7, 2));
  fixture_.engine->WaitIdle();
  CheckpointStore& store = *fixture_.engine->options().checkpoints;
  const std::unique_ptr<CheckpointWriter> writer = *store.Begin("h", "b");
  std::promise<absl::StatusOr<HeadCheckpoint>> saved;
  std::vector<float> row(EngineFixture::kHidden);
  // On the device's thread, so that nothing comes between the two.
  fixture_.head->ReadWeights(
      0, 1, kernels::DataType::kFloat32, {row.data()}, [&](const absl::StatusOr<uint64_t>&) {
        fixture_.head->Save(
            Head::SaveAs::kTagged, {}, writer.get(),
            [&](absl::StatusOr<HeadCheckpoint> checkpoint) { saved.set_value(std::move(checkpoint)); });
        EXPECT_TRUE(AbortFlush(*fixture_.head, flush).ok());
      });
  absl::StatusOr<HeadCheckpoint> checkpoint = testing::Await("the checkpoint", saved);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->window.tokens, 2U);
  ASSERT_TRUE(store.Commit(*writer, *std::move(checkpoint)).ok());
  ASSERT_TRUE(fixture_.engine->RestoreCheckpoint("h", "b").ok());
  EXPECT_EQ(fixture_.GradientSum(), 12);
}

}  // namespace
}  // namespace lossd::engine::restoring_test
