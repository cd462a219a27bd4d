// Heads over replicas that are saved and restored: a checkpoint is that of one server which had all batches,
// into however many replicas it goes, and whoever is lost meanwhile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/optimizer_state.h"
#include "server/engine/replicas/joint_checkpoint.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"
#include "tests/unit/rpc/replicas/checkpointed_servers.h"
#include "tests/unit/rpc/replicas/passing_part.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::replica_set_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Case {
  SetSize size;
  bool master;
};
void PrintTo(const Case& param, std::ostream* out) {
  PrintTo(param.size, out);
  *out << ", " << (param.master ? "bf16 with master weights" : "fp32");
}

class ReplicaCheckpointTest : public ::testing::TestWithParam<Case> {
 protected:
  static HeadConfig Config() { return GetParam().master ? MasterHead() : ReplicaServers::AdamWHead(); }
  static SetSize size() { return GetParam().size; }

  CheckpointFolder folder_;
};

TEST_P(ReplicaCheckpointTest, OneOfTheMiddleOfAWindowGoesIntoAsManyReplicasAsThereAre) {
  std::map<std::string, std::string> saved;
  std::map<std::string, std::string> stepped;
  uint64_t tokens = 0;
  {
    CheckpointedServers servers(size(), Config(), folder_);
    servers.Compute(100);
    ASSERT_TRUE(servers.Step().ok());
    servers.Compute(200);
    const absl::StatusOr<SavedCheckpoint> save = servers.Save("a");
    ASSERT_TRUE(save.ok()) << save.status();
    EXPECT_EQ(save->info.generation, 2U);
    EXPECT_EQ(save->info.optimizer_steps, 1);
    tokens = save->info.window_tokens;
    saved = servers.State();
    const absl::StatusOr<StepResult> step = servers.Step();
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_EQ(step->window_tokens, tokens);
    stepped = servers.State();
    servers.Compute(300);
    ASSERT_TRUE(servers.Step().ok());

    const absl::StatusOr<CheckpointInfo> restored = servers.Restore("a");
    ASSERT_TRUE(restored.ok()) << restored.status();
    EXPECT_EQ(servers.State(), saved);
    servers.ExpectAllAlike();
    EXPECT_EQ(servers.all().at(0).head()->restores(), 1U);
    const absl::StatusOr<StepResult> again = servers.Step();
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->window_tokens, tokens);
    EXPECT_EQ(servers.State(), stepped);
    servers.ExpectAllAlike();
  }
  for (const SetSize& others : {SetSize{1}, SetSize{2}, SetSize{3}, SetSize{2, 2}}) {
    SCOPED_TRACE(::testing::PrintToString(others));
    CheckpointedServers servers(others, Config(), folder_);
    const absl::StatusOr<CheckpointInfo> restored = servers.Restore("a");
    ASSERT_TRUE(restored.ok()) << restored.status();
    EXPECT_EQ(servers.State(), saved);
    const std::vector<SessionMarks> marks = servers.all().Marks();
    EXPECT_EQ(marks.size(), static_cast<size_t>(size().replicas)) << "each session is at one of them";
    const absl::StatusOr<StepResult> step = servers.Step();
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_EQ(step->window_tokens, tokens);
    EXPECT_EQ(servers.State(), stepped);
    servers.ExpectAllAlike();
  }
}

TEST_P(ReplicaCheckpointTest, OneOfAServerThatWasAloneGoesIntoReplicas) {
  std::map<std::string, std::string> stepped;
  {
    CheckpointedServers one(SetSize{1}, Config(), folder_);
    one.Compute(100);
    ASSERT_TRUE(one.Step().ok());
    one.Compute(200);
    ASSERT_TRUE(one.Save("a").ok());
    ASSERT_TRUE(one.Step().ok());
    stepped = one.State();
  }
  CheckpointedServers servers(size(), Config(), folder_);
  const absl::StatusOr<CheckpointInfo> restored = servers.Restore("");
  ASSERT_TRUE(restored.ok()) << restored.status();
  ASSERT_TRUE(servers.Step().ok());
  EXPECT_EQ(servers.State(), stepped);
  servers.ExpectAllAlike();
  servers.Compute(300);
  EXPECT_TRUE(servers.Step().ok()) << "windows go on";
}

TEST_P(ReplicaCheckpointTest, ASavedWindowGoesOnAndCountsEveryBatchOnce) {
  std::map<std::string, std::string> state;
  for (const bool saves : {false, true}) {
    CheckpointedServers servers(size(), Config(), folder_);
    for (uint64_t seed : {100, 200, 300}) {
      servers.Compute(seed);
      if (saves) {
        ASSERT_TRUE(servers.Save("a").ok());
      }
      servers.Compute(seed + 50);
      ASSERT_TRUE(servers.Step().ok());
    }
    if (saves) {
      EXPECT_EQ(servers.State(), state);
    } else {
      state = servers.State();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, ReplicaCheckpointTest,
                         ::testing::Values(Case{{2}, true}, Case{{2}, false}, Case{{3}, true},
                                           Case{{3}, false}, Case{{2, 2}, true}));

// A disk on which the first file of a checkpoint takes until it is let go.
class SlowDisk {
 public:
  engine::DurableFiles::Fault fault() {
    return [this](absl::string_view step, const std::string& /*path*/) {
      if (step == "create" && !waited_.exchange(true)) {
        reached_.set_value();
        go_.get_future().wait();
      }
      return 0;
    };
  }
  void AwaitReached() { reached_.get_future().wait(); }
  void LetGo() { go_.set_value(); }

 private:
  std::atomic<bool> waited_ = false;
  std::promise<void> reached_;
  std::promise<void> go_;
};

TEST(ReplicaCheckpoint, AStepThatComesMeanwhileWaitsAndChunksDoNot) {
  CheckpointFolder folder;
  SlowDisk disk;
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder, disk.fault());
  servers.Compute(100);
  auto saving = std::async(std::launch::async, [&] { return servers.Save("a"); });
  disk.AwaitReached();
  servers.Compute(200);
  auto step = servers.all().BeginStep(1, servers.all().Marks(), {.learning_rate = 1e-2});
  EXPECT_NE(step.wait_for(std::chrono::milliseconds(100)), std::future_status::ready);
  disk.LetGo();
  const absl::StatusOr<SavedCheckpoint> saved = saving.get();
  ASSERT_TRUE(saved.ok()) << saved.status();
  const absl::StatusOr<StepResult> stepped = ReplicaServers::Answer(std::move(step));
  ASSERT_TRUE(stepped.ok()) << stepped.status();
  EXPECT_EQ(2 * saved->info.window_tokens, stepped->window_tokens) << "what came meanwhile is not in it";
  const std::map<std::string, std::string> with_all = servers.State();
  ASSERT_TRUE(servers.Restore("a").ok());
  servers.Compute(200);
  ASSERT_TRUE(servers.Step().ok());
  EXPECT_EQ(servers.all().at(0).head()->Info().optimizer_steps, 1);
}

TEST(ReplicaCheckpoint, AReplicaThatIsLostFailsTheSaveAndNothingElse) {
  CheckpointFolder folder;
  SlowDisk disk;
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder, disk.fault());
  servers.Compute(100);
  ASSERT_TRUE(servers.Step().ok());
  const std::map<std::string, std::string> before = servers.State();
  servers.Compute(200);
  auto saving = std::async(std::launch::async, [&] { return servers.Save("a"); });
  disk.AwaitReached();
  servers.set().proxy().CutAll();
  disk.LetGo();
  const absl::StatusOr<SavedCheckpoint> saved = saving.get();
  EXPECT_TRUE(absl::IsUnavailable(saved.status())) << saved.status();
  servers.set().AwaitWhole();
  EXPECT_THAT(*servers.engine().ListCheckpoints("h"), IsEmpty());
  EXPECT_EQ(servers.State(), before);
  EXPECT_TRUE(servers.Step().ok());
  EXPECT_TRUE(servers.Save("b").ok());
}

TEST(ReplicaCheckpoint, WhoNamesSomeSessionsIsToldOfTheOthers) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder);
  servers.Compute(100);
  for (size_t left_out = 0; left_out < 3; ++left_out) {
    std::vector<SessionMarks> marks = servers.all().Marks();
    const std::string id = marks[left_out].session_id;
    marks.erase(marks.begin() + static_cast<std::ptrdiff_t>(left_out));
    const absl::Status refused = servers.Save("a", marks).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(refused.message(), HasSubstr(id));
  }
  EXPECT_THAT(*servers.engine().ListCheckpoints("h"), IsEmpty());
  EXPECT_TRUE(servers.Step().ok()) << "nothing is held back";
}

TEST(ReplicaCheckpoint, ItIsOfTheHistoryThatTheCallerNames) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{2}, MasterHead(), folder);
  servers.Compute(100);
  const auto now = [&] {
    return engine::CheckpointPast{.restores = servers.all().at(0).head()->restores(),
                                  .history = servers.engine().replicas().Read().history};
  };
  const auto save = [&](const engine::CheckpointPast& past) {
    return servers.engine().SaveCheckpoint("h", "a", past).status();
  };
  const engine::CheckpointPast first = now();
  EXPECT_TRUE(save(first).ok());
  EXPECT_TRUE(absl::IsAborted(save({.history = first.history + 1})));
  servers.set().Replace(0);
  servers.set().AwaitWhole();
  EXPECT_TRUE(absl::IsAborted(save(first))) << "all went back to a checkpoint";
  const engine::CheckpointPast second = now();
  EXPECT_TRUE(save(second).ok());
  ASSERT_TRUE(servers.Restore("a").ok());
  const absl::Status undone = save(second);
  EXPECT_TRUE(absl::IsAborted(undone)) << undone;
  EXPECT_TRUE(engine::PositionOf(undone).has_value());
  EXPECT_TRUE(save(now()).ok());

  CheckpointFolder of_one;
  CheckpointedServers one(SetSize{1}, MasterHead(), of_one);
  one.Compute(100);
  EXPECT_TRUE(absl::IsAborted(one.engine().SaveCheckpoint("h", "a", {.history = first.history}).status()));
}

TEST(ReplicaCheckpoint, OthersSayWhoKeepsThem) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{2}, MasterHead(), folder);
  const absl::Status refused = servers.all().at(1).engine().SaveCheckpoint("h", "a").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("replica 0"));
}

TEST(ReplicaCheckpoint, WithoutAllReplicasNothingIsSavedOrRestored) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{2}, MasterHead(), folder);
  servers.Compute(100);
  ASSERT_TRUE(servers.Save("a").ok());
  servers.set().Leave(1);
  while (servers.set().set(0).Whole().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(absl::IsUnavailable(servers.Save("b").status()));
}

TEST(ReplicaCheckpoint, AStartRestoresWhatNoReplicaHas) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder);
  servers.Compute(100);
  ASSERT_TRUE(servers.Save("a").ok());
  const std::map<std::string, std::string> saved = servers.State();
  ASSERT_TRUE(servers.Step().ok());
  servers.set().Replace(0);
  servers.set().AwaitWhole();
  EXPECT_EQ(servers.State(), saved) << "all have gone back to it";
  const auto nothing = servers.engine().RestoreAtStart(std::nullopt);
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  EXPECT_THAT(*nothing, IsEmpty());

  for (int32_t replica = 0; replica < 3; ++replica) servers.all().at(replica).engine().DropHead("h");
  const auto restored = servers.engine().RestoreAtStart(std::nullopt);
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->size(), 1U);
  servers.ReconnectAll();
  EXPECT_EQ(servers.State(), saved);
  servers.ExpectAllAlike();
  EXPECT_TRUE(servers.Step().ok());
}

TEST(ReplicaCheckpoint, OneOfAnEarlierHeadOfThisNameIsNotWhatAllGoBackTo) {
  CheckpointFolder folder;
  {
    CheckpointedServers servers(SetSize{2}, MasterHead(), folder);
    servers.Compute(100);
    ASSERT_TRUE(servers.Save("a").ok());
  }
  CheckpointedServers servers(SetSize{2}, MasterHead(), folder);  // which create it anew
  servers.set().Replace(1);
  servers.set().AwaitWhole();
  for (int32_t replica = 0; replica < 2; ++replica) {
    EXPECT_TRUE(absl::IsNotFound(servers.all().at(replica).engine().FindHead("h").status()));
  }
  EXPECT_EQ(servers.engine().ListCheckpoints("h")->size(), 1U) << "it stays, and can be restored by name";
}

TEST(ReplicaCheckpoint, ADrainSavesAllReplicas) {
  CheckpointFolder folder;
  uint64_t tokens = 0;
  {
    CheckpointedServers servers(SetSize{2}, MasterHead(), folder);
    servers.Compute(100);
    servers.engine().BeginDrain();
    const absl::StatusOr<engine::DrainedHeads> drained = servers.engine().SaveForDrain();
    ASSERT_TRUE(drained.ok()) << drained.status();
    ASSERT_THAT(drained->failed, IsEmpty());
    tokens = drained->saved.front().info.window_tokens;
  }
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder);
  for (int32_t replica = 0; replica < 3; ++replica) servers.all().at(replica).engine().DropHead("h");
  const auto drain = servers.engine().options().checkpoints->ReadDrain();
  ASSERT_TRUE(drain.ok() && drain->has_value());
  const auto restored = servers.engine().RestoreAtStart(*drain);
  ASSERT_TRUE(restored.ok()) << restored.status();
  servers.ReconnectAll();
  const absl::StatusOr<StepResult> step = servers.Step();
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->window_tokens, tokens);
}

class RestoredWindowTest : public ::testing::TestWithParam<int32_t> {};

TEST_P(RestoredWindowTest, ComesBackWithItsSessionsWhoeverIsLost) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{3}, ReplicaServers::AdamWHead(), folder);
  servers.Compute(100);
  ASSERT_TRUE(servers.Save("a").ok());
  ASSERT_TRUE(servers.Step().ok());
  const std::map<std::string, std::string> stepped = servers.State();
  servers.set().Replace(GetParam());
  servers.set().AwaitWhole();
  EXPECT_EQ(servers.all().Marks().size(), 3U);
  servers.ReconnectAll();
  ASSERT_TRUE(servers.Step().ok());
  EXPECT_EQ(servers.State(), stepped);
}

INSTANTIATE_TEST_SUITE_P(Replicas, RestoredWindowTest, ::testing::Values(0, 1, 2));

// What a coordinator leaves behind that was lost when it had overwritten some rows.
TEST(ReplicaCheckpoint, AHeadThatIsHalfRestoredIsRestoredAgain) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder);
  servers.Compute(100);
  ASSERT_TRUE(servers.Save("a").ok());
  const std::map<std::string, std::string> saved = servers.State();
  ASSERT_TRUE(servers.Step().ok());
  const std::shared_ptr<engine::Head> half = servers.all().at(1).head();
  std::promise<absl::Status> begun;
  half->BeginRestorePart([&](const auto& part) { begun.set_value(part.status()); });
  ASSERT_TRUE(begun.get_future().get().ok());
  std::promise<absl::Status> written;
  const kernels::RowSpan rows = kernels::SliceLayout(ReplicaServers::kVocab, 3).Slice(1);
  half->WritePartRows({"exp_avg", rows},
                      std::string(rows.count * ReplicaServers::kHidden * sizeof(float), '\1'),
                      [&](const absl::Status& status) { written.set_value(status); });
  ASSERT_TRUE(written.get_future().get().ok());
  servers.set().Replace(0);
  servers.set().AwaitWhole();
  servers.ReconnectAll();
  EXPECT_EQ(servers.State(), saved);
  servers.ExpectAllAlike();
  EXPECT_TRUE(servers.Step().ok());
}

// A source that fails when so many pieces of it were read.
class FailingSource : public engine::StateSource {
 public:
  FailingSource(engine::HeadCheckpoint checkpoint, int reads)
      : checkpoint_(std::move(checkpoint)), left_(reads) {}
  const engine::HeadCheckpoint& checkpoint() const override { return checkpoint_; }
  absl::Status Read(const std::string& /*name*/, int64_t /*offset*/,
                    std::span<std::byte> /*out*/) const override {
    if (left_-- > 0) return absl::OkStatus();
    return absl::DataLossError("the disk is broken");
  }

 private:
  const engine::HeadCheckpoint checkpoint_;
  mutable int left_;
};

absl::StatusOr<engine::FileKeys> RestoreFrom(CheckpointedServers& servers,
                                             const std::shared_ptr<const engine::StateSource>& source) {
  const std::shared_ptr<engine::Head> head = servers.all().at(0).head();
  const auto replicas = servers.set().set(0).FindReplicas(*head);
  if (!replicas.ok()) return replicas.status();
  return engine::RestoreTogether(head, *replicas, {head->restores() + 1, source->checkpoint().weight_version},
                                 source);
}

absl::Status RestoreFailing(CheckpointedServers& servers, const std::string& tag, int reads) {
  const auto reader = servers.engine().options().checkpoints->Find("h", tag);
  if (!reader.ok()) return reader.status();
  return RestoreFrom(servers, std::make_shared<FailingSource>(reader->checkpoint(), reads)).status();
}

// With the keys of a later step, the next save would link the restored file in place of the stepped tensor.
TEST(ReplicaCheckpoint, ARestoreAnswersTheKeysOfWhatItReadAlone) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{2}, MasterHead(), folder);
  servers.Compute(100);
  ASSERT_TRUE(servers.Step().ok());
  ASSERT_TRUE(servers.Save("a").ok());
  engine::CheckpointStore& store = *servers.engine().options().checkpoints;
  auto found = store.Find("h", "a");
  ASSERT_TRUE(found.ok()) << found.status();
  const auto reader = std::make_shared<engine::CheckpointReader>(*std::move(found));
  ASSERT_TRUE(reader->Verify().ok());
  const absl::StatusOr<engine::FileKeys> keys = RestoreFrom(servers, reader);
  ASSERT_TRUE(keys.ok()) << keys.status();
  EXPECT_EQ(keys->size(), reader->checkpoint().tensors.size());
  servers.ReconnectAll();
  servers.Compute(200);
  ASSERT_TRUE(servers.Step().ok());
  for (const auto& [file, key] : *keys) store.Remember(*reader, file, key);
  const std::map<std::string, std::string> stepped = servers.State();
  ASSERT_TRUE(servers.Save("b").ok());
  ASSERT_TRUE(servers.Restore("b").ok());
  EXPECT_EQ(servers.State(), stepped);
}

TEST(ReplicaCheckpoint, ARestoreThatFailsBeforeItHasWrittenAnythingChangesNothing) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder);
  servers.Compute(100);
  ASSERT_TRUE(servers.Step().ok());
  ASSERT_TRUE(servers.Save("a").ok());
  servers.Compute(200);
  const absl::Status failed = RestoreFailing(servers, "a", 0);
  ASSERT_EQ(failed.code(), absl::StatusCode::kDataLoss) << failed;
  const absl::StatusOr<StepResult> step = servers.Step();
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->window_tokens, 12U) << "of replicas that have 3, 4, and 5";
  servers.Compute(300);
  EXPECT_TRUE(servers.Step().ok());
}

TEST(ReplicaCheckpoint, ARestoreThatFailsLaterIsMadeAgain) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder);
  servers.Compute(100);
  ASSERT_TRUE(servers.Step().ok());
  ASSERT_TRUE(servers.Save("a").ok());
  const std::map<std::string, std::string> saved = servers.State();
  // Pieces of the first tensor are of each replica in its turn: one has nothing of it when the first is read.
  const absl::Status failed = RestoreFailing(servers, "a", 1);
  ASSERT_EQ(failed.code(), absl::StatusCode::kDataLoss) << failed;
  EXPECT_FALSE(servers.Step().ok()) << "of what is half overwritten";
  ASSERT_TRUE(servers.Restore("a").ok());
  EXPECT_EQ(servers.State(), saved);
  servers.Compute(300);
  EXPECT_TRUE(servers.Step().ok());
}

// A replica whose answers about one tensor have another size than was asked for.
class OddPart : public PassingPart {
 public:
  OddPart(std::shared_ptr<engine::ReplicaPart> part, std::string tensor, int64_t more)
      : PassingPart(std::move(part)), tensor_(std::move(tensor)), more_(more) {}
  void ReadRows(const PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done) override {
    const int64_t more = rows.tensor == tensor_ ? more_ : 0;
    PassingPart::ReadRows(rows, [more, done = std::move(done)](absl::StatusOr<std::string> bytes) {
      if (bytes.ok()) bytes->resize(static_cast<size_t>(static_cast<int64_t>(bytes->size()) + more));
      done(std::move(bytes));
    });
  }

 private:
  const std::string tensor_;
  const int64_t more_;
};

TEST(ReplicaCheckpoint, RowsOfAnotherSizeThanWasAskedForAreNotSaved) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder);
  servers.Compute(100);
  ASSERT_TRUE(servers.Step().ok());
  servers.Compute(200);
  class Nowhere : public engine::StateSink {
    absl::Status Add(const std::string& /*name*/, const std::string& /*key*/,
                     absl::FunctionRef<absl::Status(const Append& append)> fill) override {
      return fill([](std::span<const std::byte> /*bytes*/) { return absl::OkStatus(); });
    }
  } sink;
  const std::shared_ptr<engine::Head> head = servers.all().at(0).head();
  for (const std::string tensor : {"exp_avg", ""}) {  // the last is the sum of the gradients
    for (const int64_t more : {4, -4}) {
      auto replicas = *servers.set().set(0).FindReplicas(*head);
      for (auto& part : replicas.others) part = std::make_shared<OddPart>(std::move(part), tensor, more);
      const absl::Status saved =
          engine::SaveTogether(head, replicas, {}, engine::SavedWindow::kAsItIs, &sink).status();
      EXPECT_EQ(saved.code(), absl::StatusCode::kInternal) << saved << ", '" << tensor << "', " << more;
    }
  }
  EXPECT_TRUE(servers.Step().ok()) << "windows go on";
}

// As one whose device fails.
TEST(ReplicaCheckpoint, AHeadThatEndsMeanwhileIsNotSaved) {
  CheckpointFolder folder;
  CheckpointedServers servers(SetSize{2}, MasterHead(), folder);
  servers.Compute(100);
  struct Ending : engine::StateSink {
    absl::Status Add(const std::string& /*name*/, const std::string& /*key*/,
                     absl::FunctionRef<absl::Status(const Append& append)> fill) override {
      absl::Status filled = fill([](std::span<const std::byte> /*bytes*/) { return absl::OkStatus(); });
      engine->DropHead("h");
      return filled;
    }
    Engine* engine = nullptr;
  } sink;
  sink.engine = &servers.engine();
  const std::shared_ptr<engine::Head> head = servers.all().at(0).head();
  const absl::Status saved = engine::SaveTogether(head, *servers.set().set(0).FindReplicas(*head), {},
                                                  engine::SavedWindow::kAsItIs, &sink)
                                 .status();
  EXPECT_TRUE(absl::IsUnavailable(saved)) << saved;
}

// Whoever is killed, and whenever.
class KilledCheckpointTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  // Another replica than the coordinator, whose caller would be lost as well.
  void KillSoon(CheckpointedServers& servers) {
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<int>(0, 20000)(random_)));
    servers.set().Replace(std::uniform_int_distribution<int32_t>(1, servers.replicas() - 1)(random_));
  }
  std::mt19937 random_{GetParam()};
  CheckpointFolder folder_;
};

TEST_P(KilledCheckpointTest, ASaveIsWholeOrThereIsNone) {
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder_);
  ASSERT_TRUE(servers.Save("first").ok());
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    servers.Compute(1000 * static_cast<uint64_t>(round));
    const std::string tag = "t" + std::to_string(round);
    auto saving = std::async(std::launch::async, [&] { return servers.Save(tag); });
    KillSoon(servers);
    const absl::StatusOr<SavedCheckpoint> saved = saving.get();
    servers.set().AwaitWhole();
    servers.ReconnectAll();
    const std::map<std::string, std::string> state = servers.State();
    ASSERT_TRUE(servers.Step().ok()) << "windows go on";
    if (saved.ok()) {
      ASSERT_TRUE(servers.Restore(tag).ok());
      EXPECT_EQ(servers.State(), state);
      ASSERT_TRUE(servers.Step().ok());
    } else {
      EXPECT_TRUE(absl::IsUnavailable(saved.status())) << saved.status();
      EXPECT_TRUE(absl::IsNotFound(servers.engine().RestoreCheckpoint("h", tag).status()));
    }
  }
}

TEST_P(KilledCheckpointTest, ARestoreComesToItsEndAllTheSame) {
  CheckpointedServers servers(SetSize{3}, MasterHead(), folder_);
  servers.Compute(100);
  ASSERT_TRUE(servers.Step().ok());
  const std::map<std::string, std::string> saved = servers.State();
  servers.Compute(200);
  ASSERT_TRUE(servers.Save("a").ok());
  ASSERT_TRUE(servers.Step().ok());
  const std::map<std::string, std::string> stepped = servers.State();
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    auto restoring =
        std::async(std::launch::async, [&] { return servers.engine().RestoreCheckpoint("h", "a"); });
    KillSoon(servers);
    const absl::StatusOr<CheckpointInfo> restored = restoring.get();
    ASSERT_TRUE(restored.ok() || absl::IsUnavailable(restored.status())) << restored.status();
    ASSERT_NO_FATAL_FAILURE(servers.ExpectRestoredAsAWhole(200, saved, stepped));
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, KilledCheckpointTest, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace lossd::rpc::replica_set_test
