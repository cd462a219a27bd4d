// Saves by themselves (EngineOptions::checkpoint_steps), on a disk that can be held and that can be full.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/checkpoint/checkpoint_fixture.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::step_saves_test {
namespace {

using ::testing::HasSubstr;
using Outcome = StepSaveReport::Outcome;

// Thread-safe.
class Disk {
 public:
  // What is done next to a path with this in it waits until Release.
  void Hold(const std::string& path) {
    const std::lock_guard lock(mutex_);
    held_ = path;
  }
  void AwaitHeld() {
    std::unique_lock lock(mutex_);
    testing::Await("the disk to be used", changed_, lock, [this] { return waiting_; });
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    held_.clear();
    changed_.notify_all();
  }
  void Fill(bool full) {
    const std::lock_guard lock(mutex_);
    full_ = full;
  }
  int Use(absl::string_view step, const std::string& path) {
    std::unique_lock lock(mutex_);
    const auto holds = [&] { return !held_.empty() && path.find(held_) != std::string::npos; };
    waiting_ = holds();
    if (waiting_) changed_.notify_all();
    testing::Await("the disk to be released", changed_, lock, [&] { return !holds(); });
    return full_ && step == "write" ? ENOSPC : 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string held_;
  bool waiting_ = false;
  bool full_ = false;
};

class StepSavesTest : public CheckpointTest {
 protected:
  StepSavesTest() {
    fault_ = [this](absl::string_view step, const std::string& path) { return disk_.Use(step, path); };
    on_step_save_ = [this](const StepSaveReport& report) {
      const std::lock_guard lock(mutex_);
      reports_.push_back(report);
      changed_.notify_all();
    };
    checkpoint_steps_ = 1;
  }
  ~StepSavesTest() override {
    disk_.Release();
    StopEngine();
  }
  void Begin(int64_t every) {
    checkpoint_steps_ = every;
    StartEngine(Start::kEmpty);
    CreateHead(WithEverything());
    WriteWeights(1);
    Resume();
  }
  void Resume() { lane_ = Attach(engine_->OpenSession("h", {"c", 0, 1})->info.session_id); }
  void SendOne() {
    const uint64_t sequence = ++sequence_;
    Send(lane_, sequence, static_cast<int64_t>(sequence % 10) * 10, head_->Info().generation);
  }
  void SendAndStep() {
    SendOne();
    const absl::StatusOr<StepResult> step = Step();
    ASSERT_TRUE(step.ok()) << step.status();
  }
  StepSaveReport AwaitReport(size_t number) {
    std::unique_lock lock(mutex_);
    testing::Await("a save by itself", changed_, lock, [&] { return reports_.size() > number; });
    return reports_[number];
  }
  std::vector<std::string> Tags() {
    std::vector<std::string> tags;
    const absl::StatusOr<std::vector<CheckpointInfo>> listed = engine_->ListCheckpoints("h");
    for (const CheckpointInfo& info : *listed) tags.push_back(info.tag);
    return tags;
  }

  Disk disk_;
  LaneAttachment lane_;
  uint64_t sequence_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<StepSaveReport> reports_;
};

TEST_F(StepSavesTest, EveryNthStepIsSavedAsItLeftTheHead) {
  Begin(2);
  SendAndStep();
  EXPECT_EQ(head_->Info().steps_since_checkpoint, 1);
  SendAndStep();
  EXPECT_EQ(AwaitReport(0).tag, "auto-2");
  const Content left = Look();
  SendOne();
  SendAndStep();  // 3
  EXPECT_EQ(head_->Info().steps_since_checkpoint, 1);
  EXPECT_EQ(head_->Snapshot().steps_since_checkpoint, 1);
  const std::vector<CheckpointInfo> all = *engine_->ListCheckpoints("h");
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(all[0].optimizer_steps, 2);
  EXPECT_EQ(all[0].generation, 3U);
  EXPECT_EQ(all[0].window_tokens, 0U);
  EXPECT_EQ(engine_->counters().step_saves_ok, 1U);
  EXPECT_EQ(engine_->counters().checkpoint_saves.ok, 1U);

  StartEngine(Start::kKilled);
  ASSERT_TRUE(restored_.ok()) << restored_.status();
  EXPECT_EQ(Look(), left);
  EXPECT_EQ(head_->Info().steps_since_checkpoint, 0);
  // The session goes on from the marks of that moment.
  Resume();
  EXPECT_EQ(lane_.marks.accepted, 2U);
  sequence_ = 2;
  SendAndStep();
  SendAndStep();
  EXPECT_EQ(AwaitReport(1).tag, "auto-4");
  EXPECT_EQ(Tags(), (std::vector<std::string>{"auto-4", "auto-2"}));
}

TEST_F(StepSavesTest, StepsGoOnWhileTheDiskStandsStillAndWhatIsSavedIsOfItsStep) {
  Begin(1);
  disk_.Hold(".tmp-auto-");
  SendAndStep();
  const Content first = Look();
  disk_.AwaitHeld();
  for (int i = 0; i < 3; ++i) SendAndStep();
  WriteWeights(5);
  SendOne();
  const StepSaveReport passed = AwaitReport(0);
  EXPECT_EQ(passed.outcome, Outcome::kPassedOver);
  EXPECT_EQ(passed.tag, "auto-1") << "which is under way";
  EXPECT_EQ(engine_->counters().step_saves_passed_over, 3U);
  EXPECT_EQ(head_->Info().steps_since_checkpoint, 4);
  disk_.Release();
  const StepSaveReport saved = AwaitReport(1);
  EXPECT_EQ(saved.outcome, Outcome::kSaved) << saved.why;
  EXPECT_EQ(saved.passed_over, 3);
  EXPECT_EQ(Tags(), std::vector<std::string>{"auto-1"}) << "none was queued";
  SendAndStep();
  EXPECT_EQ(AwaitReport(2).tag, "auto-5") << "the next that is due";
  ASSERT_TRUE(engine_->DeleteCheckpoint("h", "auto-5").ok());
  StartEngine(Start::kKilled);
  EXPECT_EQ(Look(), first);
}

TEST_F(StepSavesTest, OnAFullDiskTrainingGoesOnAndTheNextIsTried) {
  Begin(1);
  SendAndStep();
  ASSERT_EQ(AwaitReport(0).outcome, Outcome::kSaved);
  disk_.Fill(true);
  SendAndStep();
  const StepSaveReport failed = AwaitReport(1);
  EXPECT_EQ(failed.outcome, Outcome::kFailed);
  EXPECT_TRUE(absl::IsResourceExhausted(failed.why)) << failed.why;
  EXPECT_EQ(engine_->counters().step_saves_failed, 1U);
  EXPECT_EQ(Tags(), std::vector<std::string>{"auto-1"}) << "the one before stays";
  EXPECT_EQ(head_->Info().steps_since_checkpoint, 1);
  disk_.Fill(false);
  SendAndStep();
  EXPECT_EQ(AwaitReport(2).outcome, Outcome::kSaved);
  EXPECT_EQ(head_->Info().steps_since_checkpoint, 0);
}

TEST_F(StepSavesTest, AStepThatIsNoneIsNotSaved) {
  Begin(1);
  ASSERT_TRUE(Step()->skipped) << "its window is empty";
  SendAndStep();
  ASSERT_EQ(AwaitReport(0).tag, "auto-1");
  ASSERT_TRUE(Step()->skipped);
  SendAndStep();
  EXPECT_EQ(AwaitReport(1).tag, "auto-2");
  EXPECT_EQ(engine_->counters().step_saves_ok, 2U);
}

// One that a client has asked for is of a later moment: it must not be passed by one that was copied before.
TEST_F(StepSavesTest, TheNewestCheckpointIsThatOfTheLatestStepWhoeverWritesFirst) {
  Begin(1);
  HeadConfig other = WithEverything();
  other.name = "other";
  ASSERT_TRUE(engine_->CreateHead(other).ok());
  for (int i = 0; i < 20; ++i) {
    disk_.Hold("heads/other");
    std::thread holding([this] { EXPECT_TRUE(engine_->SaveCheckpoint("other", "a").ok()); });
    disk_.AwaitHeld();
    SendAndStep();
    SendOne();
    std::thread saving([this] { EXPECT_TRUE(engine_->SaveCheckpoint("h", "by-client").ok()); });
    disk_.Release();
    holding.join();
    saving.join();
    const std::string tag = AwaitReport(static_cast<size_t>(i)).tag;
    const std::vector<std::string> tags = Tags();
    ASSERT_GE(tags.size(), 2U);
    EXPECT_EQ(tags[0], "by-client");
    EXPECT_EQ(tags[1], tag);
    ASSERT_TRUE(Step().ok());  // of what was sent
    AwaitReport(static_cast<size_t>(++i));
  }
}

TEST_F(StepSavesTest, OneOfAPastThatARestoreHasUndoneIsDropped) {
  Begin(1);
  ASSERT_TRUE(engine_->SaveCheckpoint("h", "a").ok());
  disk_.Hold(".restores");
  std::thread restoring([this] { EXPECT_TRUE(engine_->RestoreCheckpoint("h", "a").ok()); });
  disk_.AwaitHeld();
  SendAndStep();
  disk_.Release();
  restoring.join();
  const StepSaveReport dropped = AwaitReport(0);
  EXPECT_EQ(dropped.outcome, Outcome::kDropped);
  EXPECT_THAT(std::string(dropped.why.message()), HasSubstr("restored"));
  EXPECT_EQ(Tags(), std::vector<std::string>{"a"});
  EXPECT_EQ(engine_->counters().step_saves_dropped, 1U);
  EXPECT_EQ(engine_->counters().checkpoint_saves.failed, 0U);
  Resume();
  sequence_ = lane_.marks.accepted;
  SendAndStep();
  EXPECT_EQ(AwaitReport(1).outcome, Outcome::kSaved);
}

TEST_F(StepSavesTest, ADeletedHeadStaysDeletedAndANewOneOfTheNameIsSaved) {
  Begin(1);
  SendAndStep();
  AwaitReport(0);
  disk_.Hold(".deleted");
  std::thread deleting([this] { EXPECT_TRUE(engine_->DeleteHead("h", Head::DiscardGradient::kYes).ok()); });
  disk_.AwaitHeld();
  SendAndStep();
  disk_.Release();
  deleting.join();
  EXPECT_EQ(AwaitReport(1).outcome, Outcome::kDropped);
  StartEngine(Start::kKilled);
  EXPECT_TRUE(restored_->empty());
  CreateHead(WithEverything());
  WriteWeights(2);
  sequence_ = 0;
  Resume();
  SendAndStep();
  EXPECT_EQ(AwaitReport(2).outcome, Outcome::kSaved);
}

TEST_F(StepSavesTest, ADrainEndsOneThatIsUnderWayAndItsOwnIsTheNewest) {
  Begin(1);
  SendAndStep();
  AwaitReport(0);
  disk_.Hold(".tmp-auto-2");
  SendAndStep();
  disk_.AwaitHeld();
  SendOne();
  engine_->BeginDrain();
  engine_->WaitIdle();
  absl::StatusOr<DrainedHeads> drained = DrainedHeads();
  std::thread draining([&] { drained = engine_->SaveForDrain(); });
  disk_.Release();
  draining.join();
  ASSERT_TRUE(drained.ok() && drained->failed.empty());
  EXPECT_EQ(AwaitReport(1).outcome, Outcome::kDropped);
  EXPECT_EQ(Tags().front(), ".drain");
  StartEngine(Start::kDrained);
  EXPECT_GT(head_->Info().window_tokens, 0U) << "nothing is lost";
}

TEST_F(StepSavesTest, BeyondThoseThatAreKeptTheyAreDeleted) {
  Begin(1);
  for (const char* mine : {"mine-1", "mine-2", "mine-3", "mine-4"}) {
    ASSERT_TRUE(engine_->SaveCheckpoint("h", mine).ok());
  }
  for (size_t i = 0; i < 4; ++i) {
    SendAndStep();
    ASSERT_EQ(AwaitReport(i).outcome, Outcome::kSaved);
  }
  EXPECT_EQ(AwaitReport(3).deleted, std::vector<std::string>{"auto-1"});
  EXPECT_EQ(Tags().size(), 7U) << "a client's stay all";
  checkpoint_keep_ = 2;
  StartEngine(Start::kKilled);
  Resume();
  sequence_ = lane_.marks.accepted;
  SendAndStep();
  EXPECT_EQ(AwaitReport(4).deleted, (std::vector<std::string>{"auto-3", "auto-2"}));
}

// What stands in the checkpoint is what is said of it, behind deterministic sessions too.
TEST_F(StepSavesTest, DeterministicSessionsGoOnFromTheEndOfTheStep) {
  Begin(1);
  const std::string session = Open("d", 3);
  Send(Attach(session), 1, 0, 1, 7);  // a tile that is not full
  ASSERT_TRUE(Step().ok());
  ASSERT_EQ(AwaitReport(0).outcome, Outcome::kSaved);
  const auto go_on = [&] {
    const LaneAttachment lane = Attach(session);
    EXPECT_EQ(lane.marks.accepted, 1U);
    Send(lane, 2, 0, 2, 7);
    EXPECT_TRUE(Step().ok());
    return Look();
  };
  const Content undisturbed = go_on();
  ASSERT_TRUE(engine_->RestoreCheckpoint("h", "auto-1").ok());
  EXPECT_EQ(go_on(), undisturbed);
}

TEST_F(StepSavesTest, TheCopyIsReservedWithTheHead) {
  checkpoint_steps_ = 1;
  StartEngine(Start::kEmpty);
  const int64_t before = engine_->budget().reserved();
  CreateHead(WithEverything());
  const int64_t with = engine_->budget().reserved() - before;
  int64_t copy = 0;
  for (const MemoryItem& item : head_->Info().memory) {
    if (item.purpose == "checkpoint_copy") copy += item.bytes;
  }
  EXPECT_GE(copy, kVocab * kHidden * 4 * 3);
  HeadConfig config = WithEverything();
  config.name = "frozen";
  config.optimizer = {};
  config.weight_gradients = WeightGradients::kFrozen;
  config.master_weights = false;
  ASSERT_TRUE(engine_->CreateHead(config).ok());
  EXPECT_EQ((*engine_->FindHead("frozen"))->step_saver(), nullptr);
  EXPECT_EQ((*engine_->FindHead("frozen"))->Info().steps_since_checkpoint, std::nullopt);

  memory_limit_bytes_ = before + with - copy / 2;
  StartEngine(Start::kEmpty);
  const absl::Status refused = engine_->CreateHead(WithEverything()).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--checkpoint_steps"));
  EXPECT_EQ(engine_->budget().reserved(), before) << "and nothing is left behind";
  checkpoint_steps_ = 0;
  StartEngine(Start::kEmpty);
  EXPECT_TRUE(engine_->CreateHead(WithEverything()).ok());
}

TEST_F(StepSavesTest, AParkedHeadKnowsWhatIsSavedOfIt) {
  parking_bytes_ = int64_t{1} << 30;
  Begin(2);
  for (int i = 0; i < 3; ++i) SendAndStep();
  AwaitReport(0);
  ASSERT_TRUE(engine_->CloseSession(lane_.session_id).ok());
  head_ = nullptr;
  ASSERT_TRUE(engine_->ParkHead("h").ok());
  head_ = *engine_->FindHeadAndWait("h");
  EXPECT_EQ(head_->Info().steps_since_checkpoint, 1);
}

// On a device whose copies come later.
class CopiedAsideTest : public ::testing::Test {
 protected:
  EngineOptions Options() {
    EngineOptions options;
    options.checkpoints = store_;
    options.checkpoint_steps = 1;
    options.on_step_save = [this](const StepSaveReport& report) { report_.set_value(report); };
    options.on_device_failure = [this](const absl::Status&) { device_failed_ = true; };
    return options;
  }
  static HeadConfig WithOptimizer() {
    HeadConfig config;
    config.optimizer.kind = OptimizerKind::kAdamW;
    return config;
  }
  void StepOnce() {
    const LaneAttachment lane = engine_.Attach(engine_.Open("c"), std::make_shared<RecordingListener>());
    engine_.Submit(lane, EngineFixture::MakeChunk(1, 2));
    ASSERT_TRUE(engine_.ApplyStep(1, engine_.Marks(), {.learning_rate = 1}).ok());
  }

  CheckpointFolder folder_;
  const std::shared_ptr<CheckpointStore> store_ = *CheckpointStore::Open(folder_.path());
  std::promise<StepSaveReport> report_;
  std::atomic<bool> device_failed_ = false;
  EngineFixture engine_{Options(), {}, WithOptimizer()};
};

TEST_F(CopiedAsideTest, WhatIsWrittenIsTheCopyThatWasWaitedFor) {
  StepOnce();
  const float stepped = engine_.Weight();
  ASSERT_NE(stepped, 0);
  EXPECT_EQ(testing::Await("the save", report_).outcome, Outcome::kSaved);
  engine_.WriteWeights();
  ASSERT_TRUE(engine_.engine->RestoreCheckpoint("h", "auto-1").ok());
  EXPECT_EQ(engine_.Weight(), stepped);
}

TEST_F(CopiedAsideTest, ADeviceThatFailsMeanwhileFailsTheSaveToo) {
  engine_.gate.FailCopies();
  StepOnce();
  EXPECT_EQ(testing::Await("the save", report_).outcome, Outcome::kFailed);
  EXPECT_TRUE(device_failed_);
  EXPECT_TRUE(store_->List("h")->empty());
}

}  // namespace
}  // namespace lossd::engine::step_saves_test
