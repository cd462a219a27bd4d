// A set of replicas over a folder of checkpoints, whose connections are cut and whose processes are killed at
// random places: whatever happens, all replicas are alike whenever they are whole, and are what one server is
// after as many windows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"
#include "tests/unit/engine/replicas/replica_servers.h"
#include "tests/unit/rpc/replicas/checkpointed_servers.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::replica_set_test {
namespace {

using engine::FlushInfo;
using engine::WindowState;
using ::testing::FloatNear;
using ::testing::Pointwise;

constexpr engine::StepRequest kRequest = {.learning_rate = 1e-2};
constexpr int kWindows = 9;
constexpr int kCuts = 4;

struct Faults {
  SetSize size;
  uint32_t seed;
  bool kills = false;
  bool cuts = false;
  std::optional<EndingPhase> in = {};  // cuts alone: once a replica has come to this
};
void PrintTo(const Faults& faults, std::ostream* out) {
  PrintTo(faults.size, out);
  *out << ", seed " << faults.seed << (faults.kills ? ", kills" : "") << (faults.cuts ? ", cuts" : "");
  if (faults.in.has_value()) *out << " in phase " << static_cast<int>(*faults.in);
}

HeadConfig ConfigOf(const Faults& faults) {
  HeadConfig config = ReplicaServers::AdamWHead();
  config.bias = faults.seed % 2 == 0;
  config.double_buffer = faults.seed % 3 == 0;
  return config;
}

FaultProxy::Plan PlanOf(const Faults& faults) {
  if (!faults.cuts) return {};
  return [random = std::mt19937(faults.seed), faults](int /*connection*/) mutable {
    const int64_t least = faults.in.has_value() || faults.size.replicas == 2 ? 300 : 3000;
    return lossd::testing::CutAfter(std::uniform_int_distribution<int64_t>(least, 30000)(random));
  };
}

// One server that has all batches: what windows come to.
class Reference {
 public:
  explicit Reference(const Faults& faults) : replicas_(faults.size.replicas), one_(1, ConfigOf(faults)) {
    weights_[1] = one_.at(0).Weights();
  }
  // At the beginning of this window.
  const std::vector<float>& Weights(uint64_t generation) {
    while (!weights_.contains(generation)) EndWindow();
    return weights_.at(generation);
  }
  // The window is one that a flush ends.
  const std::vector<float>& Gradient(uint64_t generation) {
    while (!gradients_.contains(generation)) EndWindow();
    return gradients_.at(generation);
  }
  static bool IsFlushed(uint64_t generation) { return generation % 3 == 0; }

 private:
  void EndWindow() {
    const uint64_t generation = weights_.rbegin()->first;
    for (int32_t replica = 0; replica < replicas_; ++replica) {
      one_.at(0).Compute(100 * generation + static_cast<uint64_t>(replica), 3 + replica, generation);
    }
    if (IsFlushed(generation)) {
      const std::string flush_id = one_.Flush(generation)->flush_id;
      gradients_[generation] = *one_.Gradient(flush_id);
      EXPECT_TRUE(one_.Commit(flush_id).ok());
    } else {
      EXPECT_TRUE(one_.Step(generation, kRequest).ok());
    }
    weights_[generation + 1] = one_.at(0).Weights();
  }

  const int32_t replicas_;
  ReplicaServers one_;
  std::map<uint64_t, std::vector<float>> weights_;
  std::map<uint64_t, std::vector<float>> gradients_;
};

class ReplicaFaultsTest : public ::testing::TestWithParam<Faults> {
 protected:
  int32_t replicas() const { return GetParam().size.replicas; }
  ReplicaServers& servers() { return set_.servers(); }
  bool Chance(double chance) { return std::bernoulli_distribution(chance)(random_); }

  // All replicas are whole and have ended as many windows as one server that has their weights.
  uint64_t ExpectAllAlike() {
    for (;;) {
      set_.AwaitWhole();
      if (!RestoredAtStart()) continue;
      const uint64_t met = servers().at(0).engine().replicas().Read().epochs;
      std::vector<uint64_t> generations;
      std::vector<std::vector<float>> weights;
      for (int32_t replica = 0; replica < replicas(); ++replica) {
        if (!servers().at(replica).engine().FindHead("h").ok()) break;
        generations.push_back(servers().at(replica).generation());
        weights.push_back(servers().at(replica).Weights());
      }
      if (weights.size() != static_cast<size_t>(replicas())) continue;
      // They have parted meanwhile, and some may have gone back.
      const bool whole = set_.set(0).Whole().ok();
      if (!whole || servers().at(0).engine().replicas().Read().epochs != met) continue;
      for (int32_t replica = 0; replica < replicas(); ++replica) {
        const auto at = static_cast<size_t>(replica);
        EXPECT_EQ(generations[at], generations[0]) << "at replica " << replica;
        EXPECT_EQ(weights[at], weights[0]) << "at replica " << replica;
      }
      EXPECT_THAT(weights[0], Pointwise(FloatNear(1e-4F), reference_.Weights(generations[0])))
          << "in window " << generations[0];
      return generations[0];
    }
  }
  // Where all are new processes replica 0 restores what nobody has, again and again until no cut ends it.
  bool RestoredAtStart() {
    engine::Engine& first = servers().at(0).engine();
    const auto head = first.FindHead("h");
    const bool is_there = head.ok() && (*head)->weight_version() > 0;
    return is_there || first.RestoreAtStart(std::nullopt).ok();
  }
  // Whether every replica has its batch of this window in it; else another window has begun, or they have
  // parted.
  bool SendAll(uint64_t generation) {
    for (int32_t replica = 0; replica < replicas(); ++replica) {
      engine::testing::ReplicaServer& server = servers().at(replica);
      while (server.generation() == generation && server.Marks().empty()) {
        const absl::Status sent =
            server.TryCompute(100 * generation + static_cast<uint64_t>(replica), 3 + replica, generation);
        if (!sent.ok()) server.Reconnect();
        if (!sent.ok() && !set_.set(0).Whole().ok()) return false;
      }
      if (server.generation() != generation) return false;
    }
    return true;
  }
  // Kills a replica, perhaps, once some of them has come to some phase or the call is answered.
  template <class Asked>
  void MayKill(const Asked& asked) {
    if (!GetParam().kills || !Chance(0.4)) return;
    const auto phase = static_cast<EndingPhase>(std::uniform_int_distribution<int>(0, 3)(random_));
    while (!set_.AnyIn(phase) && asked.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      std::this_thread::yield();
    }
    const int32_t victim = std::uniform_int_distribution<int32_t>(0, replicas() - 1)(random_);
    set_.Replace(victim);
    ++kills_;
    if (!Chance(0.3)) return;  // or while all go back
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<int>(0, 40000)(random_)));
    set_.Replace(std::uniform_int_distribution<int32_t>(0, replicas() - 1)(random_));
    ++kills_;
  }
  void Step(uint64_t generation) {
    auto asked = servers().BeginStep(generation, servers().Marks(), kRequest);
    MayKill(asked);
    const absl::StatusOr<StepResult> step = ReplicaServers::Answer(std::move(asked));
    EXPECT_TRUE(!step.ok() || step->generation == generation + 1);
  }
  void FlushAndCommit(uint64_t generation) {
    const engine::HeadInfo info = servers().at(0).head()->Info();
    if (info.window_state == WindowState::kOpen) {
      auto asked = servers().BeginFlush(generation, servers().Marks());
      MayKill(asked);
      const absl::StatusOr<FlushInfo> flush = ReplicaServers::Answer(std::move(asked));
      if (!flush.ok()) return;
      flush_id_ = flush->flush_id;
      if (!servers().at(0).engine().FindHead("h").ok()) return;  // it was killed after it had answered
    }
    const absl::StatusOr<std::vector<float>> gradient = servers().Gradient(flush_id_);
    if (gradient.ok()) {
      EXPECT_THAT(*gradient, Pointwise(FloatNear(1e-4F), reference_.Gradient(generation)));
    }
    auto asked = servers().BeginCommit(flush_id_);
    MayKill(asked);
    const absl::StatusOr<uint64_t> committed = ReplicaServers::Answer(std::move(asked));
    EXPECT_TRUE(!committed.ok() || *committed == generation + 1);
  }

  std::mt19937 random_{GetParam().seed};
  int kills_ = 0;
  int tags_ = 0;
  std::string flush_id_;
  CheckpointFolder folder_;
  Reference reference_{GetParam()};
  SetUnderTest set_{GetParam().size, ConfigOf(GetParam()), PlanOf(GetParam()), GetParam().in,
                    KeptIn(folder_)};
};

TEST_P(ReplicaFaultsTest, AllAreWhatOneServerIsAfterAsManyWindows) {
  for (int32_t replica = 0; replica < replicas(); ++replica) set_.Meet(replica);
  // Few cuts come just while a replica is in a phase.
  const auto cut_too_seldom = [this] {
    return GetParam().cuts && !GetParam().in.has_value() && set_.proxy().faults() < kCuts;
  };
  uint64_t newest = 0;  // saved, with this generation
  const auto try_to_save = [&](uint64_t generation) {
    const auto saved = servers().at(0).engine().SaveCheckpoint("h", absl::StrCat("step-", ++tags_));
    if (saved.ok()) newest = std::max(newest, saved->info.generation);
    return saved.ok() || generation > 1;
  };
  while (!try_to_save(1)) set_.AwaitWhole();
  for (uint64_t generation = 1; generation <= kWindows || cut_too_seldom();) {
    generation = ExpectAllAlike();
    EXPECT_GE(generation, newest) << "what is saved is not lost";
    if (servers().at(0).head()->Info().window_state == WindowState::kOpen) {
      if (Chance(0.3)) (void)try_to_save(generation);
      if (!SendAll(generation)) continue;
    }
    Reference::IsFlushed(generation) ? FlushAndCommit(generation) : Step(generation);
  }
  EXPECT_EQ(kills_ > 0, GetParam().kills);
}

INSTANTIATE_TEST_SUITE_P(
    Replicas, ReplicaFaultsTest,
    ::testing::Values(Faults{.size = {2}, .seed = 1, .kills = true},
                      Faults{.size = {3}, .seed = 2, .kills = true},
                      Faults{.size = {2, 2}, .seed = 3, .kills = true},
                      Faults{.size = {2}, .seed = 4, .cuts = true},
                      Faults{.size = {3}, .seed = 5, .cuts = true},
                      Faults{.size = {2}, .seed = 6, .cuts = true, .in = EndingPhase::kSealed},
                      Faults{.size = {3}, .seed = 7, .cuts = true, .in = EndingPhase::kSummed},
                      Faults{.size = {2}, .seed = 8, .cuts = true, .in = EndingPhase::kStepping},
                      Faults{.size = {2}, .seed = 9, .kills = true, .cuts = true},
                      Faults{.size = {3}, .seed = 10, .kills = true, .cuts = true}));

// A head that nobody has saved is gone with the replica that is lost, and everybody is told.
TEST(ReplicaFaults, AHeadWithoutACheckpointIsGoneEverywhere) {
  SetUnderTest set(3);
  set.MeetAll();
  set.servers().at(2).Compute(7, 3);
  set.Replace(1);
  set.AwaitWhole();
  for (int32_t replica = 0; replica < 3; ++replica) {
    EXPECT_TRUE(absl::IsNotFound(set.servers().at(replica).engine().FindHead("h").status()));
  }
  EXPECT_TRUE(absl::IsNotFound(set.servers().at(2).TryCompute(8, 3, 1)));
  EXPECT_EQ(set.servers().at(0).engine().replicas().Read().returns, 1U);
}

// A cut that heals costs nothing: sessions, windows and a flush that holds one go on.
TEST(ReplicaFaults, ACutWhileNothingEndsCostsNothing) {
  CheckpointFolder folder;
  SetUnderTest set({3}, ReplicaServers::AdamWHead(), {}, {}, KeptIn(folder));
  ReplicaServers one(1, ReplicaServers::AdamWHead());
  set.MeetAll();
  const auto compute = [&](uint64_t generation) {
    for (int32_t replica = 0; replica < 3; ++replica) {
      set.servers().at(replica).Compute(100 * generation + static_cast<uint64_t>(replica), 3, generation);
      one.at(0).Compute(100 * generation + static_cast<uint64_t>(replica), 3, generation);
    }
  };
  compute(1);
  set.MeetAgain();
  const absl::StatusOr<StepResult> step = set.servers().Step(1, kRequest);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->window_tokens, 9U);
  ASSERT_TRUE(one.Step(1, kRequest).ok());
  EXPECT_THAT(set.servers().at(2).Weights(), Pointwise(FloatNear(1e-5F), one.at(0).Weights()));
  compute(2);
  const absl::StatusOr<FlushInfo> flush = set.servers().Flush(2);
  ASSERT_TRUE(flush.ok()) << flush.status();
  set.MeetAgain();
  EXPECT_TRUE(set.servers().Gradient(flush->flush_id).ok());
  EXPECT_EQ(*set.servers().Commit(flush->flush_id), 3U);
  EXPECT_EQ(set.servers().at(0).engine().replicas().Read().returns, 0U);
}

}  // namespace
}  // namespace lossd::rpc::replica_set_test
