// A restore of all replicas that stops at any of its steps, where one of them is killed: the others neither
// go on with a part of it, nor count a session's gradient twice or without the others'.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
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

}  // namespace
}  // namespace lossd::rpc::replica_set_test
