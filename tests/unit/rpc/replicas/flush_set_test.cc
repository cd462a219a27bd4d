// Flushes of replicas that lose each other: whatever happens in between, a flush has every batch once, stays
// under its id with its gradient, and ends everywhere alike.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/unit/engine/replicas/replica_servers.h"
#include "tests/unit/rpc/replicas/set_under_test.h"

namespace lossd::rpc::replica_set_test {
namespace {

using engine::FlushInfo;
using engine::SessionMarks;
using engine::WindowStats;
using ::testing::FloatNear;
using ::testing::Pointwise;

enum class Head { kFlushed, kAdamW, kDoubleBuffer };
HeadConfig ConfigOf(Head head) {
  HeadConfig config = head == Head::kFlushed ? ReplicaServers::FlushedHead() : ReplicaServers::AdamWHead();
  config.bias = head != Head::kAdamW;
  config.double_buffer = head == Head::kDoubleBuffer;
  return config;
}

// The same batches, or those of the next window, at all replicas and at the one server.
void Compute(int32_t replicas, uint64_t generation, uint64_t seed, ReplicaServers& servers,
             ReplicaServers& one) {
  for (int32_t replica = 0; replica < replicas; ++replica) {
    servers.at(replica).Compute(seed + static_cast<uint64_t>(replica), 3 + replica, generation);
    one.at(0).Compute(seed + static_cast<uint64_t>(replica), 3 + replica, generation);
  }
}

absl::StatusOr<std::vector<float>> GradientUntilRead(ReplicaServers& servers, const std::string& flush_id) {
  for (;;) {
    absl::StatusOr<std::vector<float>> gradient = servers.Gradient(flush_id);
    if (!absl::IsUnavailable(gradient.status())) return gradient;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

struct CutFlushes {
  Cuts cuts;
  Head head;
};
void PrintTo(const CutFlushes& cut, std::ostream* out) {
  PrintTo(cut.cuts, out);
  *out << ", head " << static_cast<int>(cut.head);
}

class CutFlushTest : public ::testing::TestWithParam<CutFlushes> {
 protected:
  int32_t replicas() const { return GetParam().cuts.size.replicas; }

  static FaultProxy::Plan Plan() {
    return [random = std::mt19937(7)](int /*connection*/) mutable {
      // Those that meet exchange some 3000 bytes for each of them.
      const int64_t least = GetParam().cuts.in.has_value() || GetParam().cuts.size.replicas == 2 ? 300 : 4000;
      return lossd::testing::CutAfter(std::uniform_int_distribution<int64_t>(least, 20000)(random));
    };
  }
  // It is held, and has the gradient of the one server.
  std::string Flush(uint64_t generation) {
    const std::vector<SessionMarks> marks = set_.servers().Marks();
    const absl::StatusOr<FlushInfo> together =
        SetUnderTest::UntilAnswered([&] { return set_.servers().BeginFlush(generation, marks, 0.5F); });
    EXPECT_TRUE(together.ok()) << together.status();
    const absl::StatusOr<FlushInfo> alone = one_.Flush(generation, 0.5F);
    EXPECT_EQ(together->window_tokens, alone->window_tokens);
    const absl::StatusOr<std::vector<float>> gradient = GradientUntilRead(set_.servers(), together->flush_id);
    EXPECT_TRUE(gradient.ok()) << gradient.status();
    EXPECT_THAT(*gradient, Pointwise(FloatNear(1e-4F), *one_.Gradient(alone->flush_id)));
    alone_ = alone->flush_id;
    return together->flush_id;
  }
  void Abort(uint64_t generation, const std::string& flush_id) {
    const absl::StatusOr<uint64_t> aborted =
        SetUnderTest::UntilAnswered([&] { return set_.servers().BeginAbort(flush_id); });
    ASSERT_TRUE(aborted.ok()) << aborted.status();
    EXPECT_EQ(*aborted, generation);
    ASSERT_TRUE(one_.Abort(alone_).ok());
  }
  void Commit(uint64_t generation, const std::string& flush_id) {
    const absl::StatusOr<uint64_t> committed =
        SetUnderTest::UntilAnswered([&] { return set_.servers().BeginCommit(flush_id); });
    ASSERT_TRUE(committed.ok()) << committed.status();
    EXPECT_EQ(*committed, generation + 1);
    for (int32_t replica = 0; replica < replicas(); ++replica) {
      EXPECT_EQ(set_.servers().at(replica).generation(), generation + 1)
          << "who is answered finds the new window everywhere, at replica " << replica;
    }
    ASSERT_TRUE(one_.Commit(alone_).ok());
  }
  void Look(uint64_t generation) {
    const std::vector<SessionMarks> marks = set_.servers().Marks();
    absl::StatusOr<WindowStats> together = absl::UnavailableError("");
    while (absl::IsUnavailable(together.status())) together = set_.servers().Stats(generation, marks);
    ASSERT_TRUE(together.ok()) << together.status();
    const absl::StatusOr<WindowStats> alone = one_.Stats(generation, one_.Marks());
    EXPECT_EQ(together->window_tokens, alone->window_tokens);
    EXPECT_NEAR(together->gradient.norm, alone->gradient.norm, 1e-5 * alone->gradient.norm);
  }

  SetUnderTest set_{GetParam().cuts.size, ConfigOf(GetParam().head), Plan(), GetParam().cuts.in};
  ReplicaServers one_{1, ConfigOf(GetParam().head)};
  std::string alone_;  // the one server's flush
};

TEST_P(CutFlushTest, EveryBatchIsFlushedOnce) {
  constexpr int kFaults = 10;
  const bool ahead = GetParam().head == Head::kDoubleBuffer;
  for (int32_t replica = 0; replica < replicas(); ++replica) set_.Meet(replica);
  for (uint64_t generation = 1; set_.proxy().faults() < kFaults; ++generation) {
    if (!ahead || generation == 1) Compute(replicas(), generation, 1000 * generation, set_.servers(), one_);
    Look(generation);
    const std::string aborted = Flush(generation);
    if (ahead) Compute(replicas(), generation + 1, 1000 * generation + 500, set_.servers(), one_);
    Abort(generation, aborted);
    const std::string committed = Flush(generation);
    if (ahead) Compute(replicas(), generation + 1, 1000 * generation + 700, set_.servers(), one_);
    Commit(generation, committed);
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, CutFlushTest,
                         ::testing::Values(CutFlushes{{{2}, {}}, Head::kFlushed},
                                           CutFlushes{{{3}, {}}, Head::kDoubleBuffer},
                                           CutFlushes{{{2}, EndingPhase::kSealed}, Head::kAdamW},
                                           CutFlushes{{{3}, EndingPhase::kSummed}, Head::kFlushed},
                                           CutFlushes{{{2}, EndingPhase::kSummed}, Head::kDoubleBuffer},
                                           CutFlushes{{{3}, EndingPhase::kCommitting}, Head::kAdamW},
                                           CutFlushes{{{2}, EndingPhase::kCommitting}, Head::kDoubleBuffer},
                                           CutFlushes{{{3}, EndingPhase::kAborting}, Head::kDoubleBuffer},
                                           CutFlushes{{{2}, EndingPhase::kAborting}, Head::kFlushed}));

// A trainer, and clients that send their batches again where a server has lost them.
class KilledFlushTest : public ::testing::TestWithParam<Kills> {
 protected:
  int32_t replicas() const { return GetParam().size.replicas; }
  ReplicaServers& servers() { return set_.servers(); }

  bool Chance(double chance) { return std::bernoulli_distribution(chance)(random_); }
  // Every replica whose window is open has its batch in it.
  void SendAll(uint64_t generation) {
    for (int32_t replica = 0; replica < replicas(); ++replica) {
      engine::testing::ReplicaServer& server = servers().at(replica);
      const engine::HeadInfo info = server.head()->Info();
      const bool open = info.generation == generation && info.window_state == engine::WindowState::kOpen;
      if (!open || !info.window_marks.empty()) continue;
      const absl::Status sent =
          server.TryCompute(100 * generation + static_cast<uint64_t>(replica), 3 + replica, generation);
      EXPECT_TRUE(sent.ok() || absl::IsAborted(sent)) << sent;
    }
  }
  // Kills a replica, perhaps twice, while this is under way: once some replica has come to one of its phases.
  template <class Asked>
  void MayKill(const Asked& asked, std::initializer_list<EndingPhase> phases) {
    if (!Chance(0.4)) return;
    const EndingPhase phase =
        *(phases.begin() + std::uniform_int_distribution<size_t>(0, phases.size() - 1)(random_));
    while (!set_.AnyIn(phase)) {
      if (asked.wait_for(std::chrono::seconds(0)) == std::future_status::ready) break;
      std::this_thread::yield();
    }
    const int32_t victim = std::uniform_int_distribution<int32_t>(0, replicas() - 1)(random_);
    set_.Replace(victim);
    if (!Chance(0.5)) return;
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<int>(0, 60000)(random_)));
    set_.Replace(victim);
  }
  // Who has no answer asks with the same marks; who is told that they are wrong, with new ones.
  FlushInfo Flush(uint64_t generation) {
    std::optional<std::vector<SessionMarks>> marks;
    for (;;) {
      if (!marks.has_value()) {
        SendAll(generation);
        marks = servers().Marks();
      }
      auto asked = servers().BeginFlush(generation, *marks);
      MayKill(asked, {EndingPhase::kOpen, EndingPhase::kSealed, EndingPhase::kSummed});
      const absl::StatusOr<FlushInfo> flush = ReplicaServers::Answer(std::move(asked));
      set_.AwaitWhole();
      if (flush.ok()) return *flush;
      if (absl::IsUnavailable(flush.status())) continue;
      EXPECT_TRUE(absl::IsAborted(flush.status()) || absl::IsFailedPrecondition(flush.status()))
          << flush.status();
      marks.reset();
    }
  }
  uint64_t End(const std::string& flush_id, bool commit) {
    for (;;) {
      auto asked = commit ? servers().BeginCommit(flush_id) : servers().BeginAbort(flush_id);
      MayKill(asked, {EndingPhase::kSummed, commit ? EndingPhase::kCommitting : EndingPhase::kAborting});
      const absl::StatusOr<uint64_t> ended = ReplicaServers::Answer(std::move(asked));
      set_.AwaitWhole();
      if (ended.ok()) return *ended;
      EXPECT_TRUE(absl::IsUnavailable(ended.status())) << ended.status();
      if (!absl::IsUnavailable(ended.status())) return 0;
    }
  }
  std::vector<float> Gradient(const std::string& flush_id) {
    const absl::StatusOr<std::vector<float>> gradient = GradientUntilRead(servers(), flush_id);
    EXPECT_TRUE(gradient.ok()) << gradient.status();
    return gradient.value_or(std::vector<float>());
  }

  std::mt19937 random_{GetParam().seed};
  const HeadConfig config_ = ConfigOf(GetParam().seed % 2 == 0 ? Head::kFlushed : Head::kDoubleBuffer);
  SetUnderTest set_{GetParam().size, config_, PlanOf(GetParam())};
};

TEST_P(KilledFlushTest, AFlushOutlivesThoseWhoHaveHadItsBatches) {
  set_.MeetAll();
  ReplicaServers one(1, config_);
  for (uint64_t generation = 1; generation <= 12; ++generation) {
    for (int32_t replica = 0; replica < replicas(); ++replica) {
      one.at(0).Compute(100 * generation + static_cast<uint64_t>(replica), 3 + replica, generation);
    }
    const absl::StatusOr<FlushInfo> alone = one.Flush(generation);
    const std::vector<float> expected = *one.Gradient(alone->flush_id);
    ASSERT_TRUE(one.Commit(alone->flush_id).ok());
    bool commit = false;
    while (!commit) {
      const FlushInfo flush = Flush(generation);
      ASSERT_EQ(flush.window_tokens, alone->window_tokens);
      ASSERT_NEAR(flush.stats.norm, alone->stats.norm, 1e-5 * alone->stats.norm);
      const std::vector<float> gradient = Gradient(flush.flush_id);
      ASSERT_THAT(gradient, Pointwise(FloatNear(1e-4F), expected)) << "in window " << generation;
      if (Chance(0.5)) {
        set_.Replace(std::uniform_int_distribution<int32_t>(0, replicas() - 1)(random_));
        set_.AwaitWhole();
        ASSERT_EQ(Gradient(flush.flush_id), gradient) << "it stays as it was, whoever holds it";
      }
      commit = Chance(0.7);
      ASSERT_EQ(End(flush.flush_id, commit), commit ? generation + 1 : generation);
      for (int32_t replica = 0; replica < replicas(); ++replica) {
        ASSERT_EQ(servers().at(replica).generation(), commit ? generation + 1 : generation)
            << "at replica " << replica;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, KilledFlushTest,
                         ::testing::Values(Kills{{2}, 1}, Kills{{2}, 2}, Kills{{3}, 3}, Kills{{3}, 4},
                                           Kills{{2}, 5, true}, Kills{{2}, 6, true}));

TEST(FlushSet, AFlushIsNotBegunWithoutAllReplicas) {
  SetUnderTest set(2);
  set.Meet(0);
  set.servers().at(0).Compute(7, 3);
  EXPECT_EQ(set.servers().Flush(1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(set.servers().Stats(1, {}).status().code(), absl::StatusCode::kUnavailable);
  set.servers().at(0).Compute(8, 2);
  set.Meet(1);
  set.AwaitWhole();
  const absl::StatusOr<FlushInfo> flush = set.servers().Flush(1);
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->window_tokens, 5U);
}

TEST(FlushSet, AFlushStaysWhileOneIsMissingAndEndsWhenItIsBack) {
  SetUnderTest set(2);
  set.MeetAll();
  for (int32_t replica = 0; replica < 2; ++replica) set.servers().at(replica).Compute(7, 3);
  const std::string flush_id = set.servers().Flush(1)->flush_id;
  const std::vector<float> gradient = *set.servers().Gradient(flush_id);
  set.Leave(1);
  while (set.set(0).Whole().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(set.servers().Commit(flush_id).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(set.servers().Abort(flush_id).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(*set.servers().Gradient(flush_id), gradient) << "its two slices are all of it";
  set.Replace(1);
  set.AwaitWhole();
  EXPECT_EQ(*set.servers().Gradient(flush_id), gradient);
  EXPECT_EQ(*set.servers().Commit(flush_id), 2U);
  EXPECT_EQ(set.servers().at(1).generation(), 2U);
}

}  // namespace
}  // namespace lossd::rpc::replica_set_test
