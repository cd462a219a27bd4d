// A restore of all replicas that stops at any of its steps, where one of them is killed: the others neither
// go on with a part of it, nor count a session's gradient twice or without the others'. And one that comes to
// nothing because of what it is to restore: whoever is lost next, the replicas meet again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>

#include "server/engine/replicas/joint_checkpoint.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"
#include "tests/unit/rpc/replicas/checkpointed_servers.h"
#include "tests/unit/rpc/replicas/passing_part.h"

namespace lossd::rpc::replica_set_test {
namespace {

using ::testing::HasSubstr;

enum class Step { kBegin, kWrite, kFinish, kInstall };

// Before `asked` is asked for `step`, which those before it have been, `killed` is.
struct Stop {
  Step step;
  int32_t asked;
  int32_t killed;
};
void PrintTo(const Stop& stop, std::ostream* out) {
  constexpr std::array kNames = {"begin", "write", "finish", "install"};
  *out << kNames.at(static_cast<size_t>(stop.step)) << " at replica " << stop.asked << ", replica "
       << stop.killed << " is killed";
}

// Where the first restore stops until it is let go.
class StoppingPlace {
 public:
  explicit StoppingPlace(const Stop& stop) : stop_(stop) {}
  void Reach(Step step, int32_t replica) {
    if (step != stop_.step || replica != stop_.asked || stopped_.exchange(true)) return;
    reached_.set_value();
    go_.get_future().wait();
  }
  void AwaitReached() { reached_.get_future().wait(); }
  void LetGo() { go_.set_value(); }

 private:
  const Stop stop_;
  std::atomic<bool> stopped_ = false;
  std::promise<void> reached_;
  std::promise<void> go_;
};

class StoppingPart : public PassingPart {
 public:
  StoppingPart(std::shared_ptr<engine::ReplicaPart> part, int32_t replica, StoppingPlace* place)
      : PassingPart(std::move(part)), replica_(replica), place_(*place) {}
  void BeginRestore(std::function<void(absl::StatusOr<engine::RestoringPart>)> done) override {
    place_.Reach(Step::kBegin, replica_);
    PassingPart::BeginRestore(std::move(done));
  }
  void WriteRows(const PartRows& rows, std::string bytes, Done done) override {
    place_.Reach(Step::kWrite, replica_);
    PassingPart::WriteRows(rows, std::move(bytes), std::move(done));
  }
  void FinishRestore(const engine::RestoredPart& part, Done done) override {
    place_.Reach(Step::kFinish, replica_);
    PassingPart::FinishRestore(part, std::move(done));
  }
  void InstallRestored(Done done) override {
    place_.Reach(Step::kInstall, replica_);
    PassingPart::InstallRestored(std::move(done));
  }

 private:
  const int32_t replica_;
  StoppingPlace& place_;
};

// Checkpoints in `folder`, and restores that come by `place`.
ReplicaServers::Customize Stopping(const CheckpointFolder& folder, StoppingPlace* place) {
  return [kept = KeptIn(folder), place](int32_t replica, EngineOptions& options) {
    kept(replica, options);
    if (replica != 0) return;
    options.find_replicas = [find = options.find_replicas, place](const engine::Head& head) {
      absl::StatusOr<engine::JointReplicas> found = find(head);
      if (!found.ok()) return found;
      int32_t other = 0;
      for (auto& part : found->others) {
        part = std::make_shared<StoppingPart>(std::move(part), ++other, place);
      }
      return found;
    };
  };
}

class StoppedRestoreTest : public ::testing::TestWithParam<Stop> {
 protected:
  CheckpointFolder folder_;
  StoppingPlace place_{GetParam()};
};

using CutRestoreTest = StoppedRestoreTest;

TEST_P(StoppedRestoreTest, IsMadeAgainOrLosesTheWindowAsAWhole) {
  CheckpointedServers servers(SetSize{3}, MasterHead(), Stopping(folder_, &place_));
  servers.Compute(100);
  ASSERT_TRUE(servers.Step().ok());
  servers.Compute(200);
  ASSERT_TRUE(servers.Save("a").ok());
  const std::map<std::string, std::string> saved = servers.State();
  ASSERT_TRUE(servers.Step().ok());
  const std::map<std::string, std::string> stepped = servers.State();
  auto restoring =
      std::async(std::launch::async, [&] { return servers.engine().RestoreCheckpoint("h", "a"); });
  place_.AwaitReached();
  servers.set().Replace(GetParam().killed);
  place_.LetGo();
  const absl::StatusOr<CheckpointInfo> restored = restoring.get();
  ASSERT_TRUE(restored.ok() || absl::IsUnavailable(restored.status())) << restored.status();
  servers.ExpectRestoredAsAWhole(200, saved, stepped);
}

// Nobody is killed, and replicas that have a head without weights are alike.
TEST_P(CutRestoreTest, IsMadeAgainOfAHeadThatItCreates) {
  CheckpointedServers servers(SetSize{3}, MasterHead(), Stopping(folder_, &place_));
  servers.Compute(100);
  ASSERT_TRUE(servers.Step().ok());
  ASSERT_TRUE(servers.Save("a").ok());
  const std::map<std::string, std::string> saved = servers.State();
  for (int32_t replica = 0; replica < 3; ++replica) servers.set().Leave(replica);
  for (int32_t replica = 0; replica < 3; ++replica) servers.set().Replace(replica);
  servers.set().AwaitWhole();
  auto restoring = std::async(std::launch::async, [&] { return servers.engine().RestoreAtStart({}); });
  place_.AwaitReached();
  servers.set().proxy().CutAll();
  while (servers.set().set(0).Whole().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  place_.LetGo();
  EXPECT_TRUE(absl::IsUnavailable(restoring.get().status()));
  servers.set().AwaitWhole();
  servers.ExpectAllAlike();
  EXPECT_EQ(servers.State(), saved);
}

std::vector<Stop> AllStops() {
  std::vector<Stop> stops;
  for (const Step step : {Step::kBegin, Step::kWrite, Step::kFinish, Step::kInstall}) {
    for (const int32_t asked : {1, 2}) {
      for (const int32_t killed : {1, 2}) stops.push_back({step, asked, killed});
    }
  }
  return stops;
}

INSTANTIATE_TEST_SUITE_P(Stops, StoppedRestoreTest, ::testing::ValuesIn(AllStops()));
INSTANTIATE_TEST_SUITE_P(Cuts, CutRestoreTest,
                         ::testing::Values(Stop{Step::kBegin, 1, 0}, Stop{Step::kBegin, 2, 0},
                                           Stop{Step::kWrite, 1, 0}, Stop{Step::kFinish, 2, 0}));

// What keeps the newest checkpoint from being restored.
enum class Obstacle { kNone, kDeterministicSession, kDamagedTensor, kDamagedManifest, kNoMemory };

struct Unrestorable {
  Obstacle before = Obstacle::kNone;     // the restore is asked for
  Obstacle meanwhile = Obstacle::kNone;  // when it has checked what it reads
  absl::StatusCode code = absl::StatusCode::kDataLoss;
};
void PrintTo(Obstacle obstacle, std::ostream* out) {
  constexpr std::array kNames = {"nothing", "a deterministic session", "a damaged tensor",
                                 "a damaged manifest", "no memory at replica 1"};
  *out << kNames.at(static_cast<size_t>(obstacle));
}
void PrintTo(const Unrestorable& param, std::ostream* out) {
  PrintTo(param.before, out);
  *out << " before, ";
  PrintTo(param.meanwhile, out);
  *out << " meanwhile";
}

// A set whose head has a checkpoint "a", and a newer one, "b", which cannot be restored any more.
class UnrestorableTest {
 protected:
  void SaveBoth() {
    servers_.Compute(100);
    ASSERT_TRUE(servers_.Step().ok());
    ASSERT_TRUE(servers_.Save("a").ok());
    saved_ = servers_.State();
    servers_.Compute(200);
    ASSERT_TRUE(servers_.Step().ok());
    ASSERT_TRUE(servers_.Save("b").ok());
  }
  void Put(Obstacle obstacle) {
    const std::filesystem::path checkpoint = folder_ / "heads/h/b";
    if (obstacle == Obstacle::kDeterministicSession) ReplaceByDeterministic(checkpoint);
    if (obstacle == Obstacle::kDamagedTensor) CheckpointFolder::Write(checkpoint / "tensor.exp_avg", "");
    if (obstacle == Obstacle::kDamagedManifest) CheckpointFolder::Write(checkpoint / "manifest.json", "{}");
    no_memory_ = obstacle == Obstacle::kNoMemory;
  }
  void ReplaceAll() {
    for (int32_t replica = 0; replica < 3; ++replica) servers_.set().Leave(replica);
    for (int32_t replica = 0; replica < 3; ++replica) servers_.set().Replace(replica);
    servers_.set().AwaitWhole();
  }
  // Not for ever, as AwaitWhole.
  bool MeetSoon() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!servers_.set().set(0).Whole().ok()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    servers_.set().AwaitWhole();
    return true;
  }
  void ExpectNobodyHasIt() {
    for (int32_t replica = 0; replica < 3; ++replica) {
      const absl::Status found = servers_.all().at(replica).engine().FindHead("h").status();
      EXPECT_TRUE(absl::IsNotFound(found)) << found << " at replica " << replica;
    }
  }
  // After another loss, and from the checkpoint before.
  void ExpectTheSetSteps() {
    no_memory_ = false;
    servers_.set().Replace(1);
    ASSERT_TRUE(MeetSoon()) << servers_.set().set(0).Whole();
    const absl::StatusOr<CheckpointInfo> restored = servers_.Restore("a");
    ASSERT_TRUE(restored.ok()) << restored.status();
    EXPECT_EQ(servers_.State(), saved_);
    servers_.Compute(300);
    EXPECT_TRUE(servers_.Step().ok());
    servers_.ExpectAllAlike();
  }

  CheckpointFolder folder_;
  StoppingPlace place_{{.step = Step::kBegin, .asked = 1, .killed = 1}};
  std::atomic<bool> no_memory_ = false;
  CheckpointedServers servers_{SetSize{3}, MasterHead(),
                               [this, stopping = Stopping(folder_, &place_)](int32_t replica, auto& options) {
                                 stopping(replica, options);
                                 if (no_memory_ && replica == 1) options.head_quota_bytes = 1;
                               }};
  std::map<std::string, std::string> saved_;  // by "a"

 private:
  static void ReplaceByDeterministic(const std::filesystem::path& checkpoint) {
    const CheckpointFolder of_one;
    CheckpointedServers one(SetSize{1}, MasterHead(), of_one);
    const auto opened = one.engine().OpenSession("h", {"d", 0, 1, engine::Deterministic::kYes});
    ASSERT_TRUE(opened.ok()) << opened.status();
    const auto listener = std::make_shared<engine::RecordingListener>();
    auto lane = opened->head->AttachLane(opened->info.session_id, 0, listener);
    ASSERT_TRUE(lane.ok()) << lane.status();
    engine::Chunk chunk = engine::testing::ReplicaServer::Tokens(opened->head->config(), 1, 3);
    chunk.sequence = 1;
    chunk.generation = one.generation();
    chunk.window_token = 0;
    ASSERT_TRUE(opened->head->Submit(*lane, chunk, [] {}).ok());
    ASSERT_EQ(listener->AwaitAnswers(1).back().error, absl::OkStatus());
    ASSERT_TRUE(one.Save("b").ok());
    std::filesystem::remove_all(checkpoint);
    std::filesystem::copy(of_one / "heads/h/b", checkpoint);
  }
};

class FailedRestoreTest : public UnrestorableTest, public ::testing::TestWithParam<Unrestorable> {};

TEST_P(FailedRestoreTest, LeavesNoHeadBehind) {
  ASSERT_NO_FATAL_FAILURE(SaveBoth());
  ASSERT_NO_FATAL_FAILURE(Put(GetParam().before));
  ReplaceAll();
  const bool stops = GetParam().meanwhile != Obstacle::kNone;
  if (!stops) place_.LetGo();
  auto restoring =
      std::async(std::launch::async, [&] { return servers_.engine().RestoreCheckpoint("h", ""); });
  if (stops) {
    place_.AwaitReached();
    Put(GetParam().meanwhile);
    place_.LetGo();
  }
  const absl::Status failed = restoring.get().status();
  EXPECT_EQ(failed.code(), GetParam().code) << failed;
  ExpectNobodyHasIt();
  ExpectTheSetSteps();
}

INSTANTIATE_TEST_SUITE_P(Obstacles, FailedRestoreTest,
                         ::testing::Values(Unrestorable{.before = Obstacle::kDeterministicSession,
                                                        .code = absl::StatusCode::kFailedPrecondition},
                                           Unrestorable{.before = Obstacle::kDamagedTensor},
                                           Unrestorable{.before = Obstacle::kDamagedManifest},
                                           Unrestorable{.before = Obstacle::kNoMemory,
                                                        .code = absl::StatusCode::kResourceExhausted},
                                           Unrestorable{.meanwhile = Obstacle::kDamagedTensor}));

class UnrestorableNewestTest : public UnrestorableTest, public ::testing::TestWithParam<Obstacle> {};

TEST_P(UnrestorableNewestTest, OfAHeadWithoutWeightsTakesTheHeadAlong) {
  ASSERT_NO_FATAL_FAILURE(SaveBoth());
  ReplaceAll();
  auto restoring =
      std::async(std::launch::async, [&] { return servers_.engine().RestoreCheckpoint("h", ""); });
  place_.AwaitReached();
  ASSERT_NO_FATAL_FAILURE(Put(GetParam()));
  if (GetParam() == Obstacle::kNoMemory) {
    servers_.set().Replace(1);
  } else {
    servers_.set().proxy().CutAll();
  }
  while (servers_.set().set(0).Whole().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  place_.LetGo();
  EXPECT_TRUE(absl::IsUnavailable(restoring.get().status()));
  ASSERT_TRUE(MeetSoon()) << servers_.set().set(0).Whole();
  ExpectNobodyHasIt();
  ExpectTheSetSteps();
}

// What its replicas have is not thrown away for an older checkpoint unasked.
TEST_P(UnrestorableNewestTest, OfAHeadWithWeightsHoldsTheSetAndSaysWhatToDo) {
  place_.LetGo();
  ASSERT_NO_FATAL_FAILURE(SaveBoth());
  ASSERT_NO_FATAL_FAILURE(Put(GetParam()));
  servers_.set().Replace(1);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  std::string why;
  while (why.find("unasked") == std::string::npos && std::chrono::steady_clock::now() < deadline) {
    why = std::string(servers_.set().set(0).Whole().message());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const bool is_named = GetParam() != Obstacle::kDamagedManifest;
  EXPECT_THAT(why, HasSubstr(is_named ? "delete h b`" : "delete h TAG`")) << "with lossctl";
  EXPECT_GT(servers_.all().at(0).head()->weight_version(), 0U);
  EXPECT_GT(servers_.all().at(2).head()->weight_version(), 0U);
  ASSERT_TRUE(servers_.engine().DeleteCheckpoint("h", "b").ok());
  if (GetParam() == Obstacle::kNoMemory) {
    no_memory_ = false;
    servers_.set().Replace(1);
  }
  ASSERT_TRUE(MeetSoon()) << servers_.set().set(0).Whole();
  servers_.ReconnectAll();
  EXPECT_EQ(servers_.State(), saved_);
  servers_.Compute(300);
  EXPECT_TRUE(servers_.Step().ok());
}

INSTANTIATE_TEST_SUITE_P(Obstacles, UnrestorableNewestTest,
                         ::testing::Values(Obstacle::kDeterministicSession, Obstacle::kDamagedTensor,
                                           Obstacle::kDamagedManifest, Obstacle::kNoMemory));

}  // namespace
}  // namespace lossd::rpc::replica_set_test
