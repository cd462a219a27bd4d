// Deterministic sessions at replicas: their gradients are summed in the order of their ranks, wherever they
// lie, so that any number of replicas has the bits of one server, whatever is aborted, saved or lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/common/replica_place.h"
#include "tests/unit/engine/checkpoint/checkpoint_folder.h"
#include "tests/unit/engine/engine_fixture.h"
#include "tests/unit/rpc/replicas/checkpointed_servers.h"

namespace lossd::rpc::replica_set_test {
namespace {

using engine::Chunk;
using engine::Deterministic;
using engine::FlushInfo;
using engine::Head;
using engine::LaneAttachment;
using engine::RecordingListener;
using engine::testing::ReplicaServer;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 7;
constexpr int32_t kRanks = 5;

// One rank of a trainer: seeded tokens for places of its window, two chunks at a time.
class RankOfTrainer {
 public:
  RankOfTrainer(CheckpointedServers* servers, int32_t rank) : servers_(*servers), rank_(rank) {}

  void Compute(uint64_t seed) {
    if (!lane_.has_value()) Open();
    const uint64_t generation = servers_.generation();
    if (std::exchange(window_, generation) != generation) place_ = 0;
    // The later places come first.
    Send(seed, place_ + kTokens / 2, place_ + kTokens, generation);
    Send(seed, place_, place_ + kTokens / 2, generation);
    place_ += kTokens;
  }
  // As after the end of a stream. The window's tokens are to be sent again.
  void Disconnect() {
    lane_.reset();
    head_.reset();  // which must not outlive its server
    window_ = 0;
  }

 private:
  void Open() {
    engine::Engine& engine = servers_.all().at(engine::ReplicaOfRank(rank_, servers_.replicas())).engine();
    const auto opened =
        engine.OpenSession("h", {absl::StrCat("rank ", rank_), rank_, 1, Deterministic::kYes});
    ASSERT_TRUE(opened.ok()) << opened.status();
    head_ = opened->head;
    sequence_ = opened->info.lanes[0].accepted;
    answered_ = 0;
    listener_ = std::make_shared<RecordingListener>();
    absl::StatusOr<LaneAttachment> lane = head_->AttachLane(opened->info.session_id, 0, listener_);
    ASSERT_TRUE(lane.ok()) << lane.status();
    lane_ = *std::move(lane);
  }
  void Send(uint64_t seed, int64_t first, int64_t end, uint64_t generation) {
    const uint64_t own = seed * 1000 + static_cast<uint64_t>(rank_ * 100 + first);
    Chunk chunk = ReplicaServer::Tokens(head_->config(), own, end - first);
    chunk.sequence = ++sequence_;
    chunk.generation = generation;
    chunk.window_token = first;
    const auto taken = head_->Submit(*lane_, chunk, [] {});
    ASSERT_TRUE(taken.ok()) << taken.status();
    ASSERT_EQ(*taken, Head::Submission::kTaken);
    ASSERT_EQ(listener_->AwaitAnswers(++answered_).back().error, absl::OkStatus());
  }

  CheckpointedServers& servers_;
  const int32_t rank_;
  std::shared_ptr<Head> head_;
  std::shared_ptr<RecordingListener> listener_;
  std::optional<LaneAttachment> lane_;
  uint64_t sequence_ = 0;
  size_t answered_ = 0;
  uint64_t window_ = 0;
  int64_t place_ = 0;
};

// A trainer of five ranks over so many servers.
class Trainer {
 public:
  explicit Trainer(const SetSize& size) : servers_(size, MasterHead(), folder_) {
    for (int32_t rank = 0; rank < kRanks; ++rank) ranks_.emplace_back(&servers_, rank);
  }

  CheckpointedServers& servers() { return servers_; }
  void Compute(uint64_t seed) {
    // Who comes first does not count.
    for (int32_t i = 0; i < kRanks; ++i) {
      const auto rank = static_cast<size_t>((i * 2 + static_cast<int32_t>(seed)) % kRanks);
      if (seed % 3 == 2 && rank == 1) continue;  // it has no tokens
      ranks_[rank].Compute(seed);
    }
  }
  void Step() {
    const absl::StatusOr<StepResult> stepped = servers_.Step();
    ASSERT_TRUE(stepped.ok()) << stepped.status();
    ASSERT_FALSE(stepped->skipped);
  }
  FlushInfo Flush() {
    const absl::StatusOr<FlushInfo> flush = servers_.all().Flush(servers_.generation());
    EXPECT_TRUE(flush.ok()) << flush.status();
    return flush.value_or(FlushInfo());
  }
  std::vector<float> Gradient(const FlushInfo& flush) { return *servers_.all().Gradient(flush.flush_id); }
  // Those of the master, whose rows lie at all servers.
  std::vector<float> Weights() { return servers_.all().at(0).Weights(); }
  void Disconnect() {
    for (RankOfTrainer& rank : ranks_) rank.Disconnect();
  }

 private:
  const CheckpointFolder folder_;
  CheckpointedServers servers_;
  std::deque<RankOfTrainer> ranks_;
};

class JointDeterministicTest : public ::testing::TestWithParam<SetSize> {
 protected:
  Trainer one_{SetSize{1}};
  Trainer all_{GetParam()};
};

TEST_P(JointDeterministicTest, StepsHaveTheBitsOfOneServer) {
  for (uint64_t window = 1; window <= 5; ++window) {
    for (Trainer* const trainer : {&one_, &all_}) {
      trainer->Compute(window);
      trainer->Compute(window + 50);
      trainer->Step();
    }
    ASSERT_EQ(all_.Weights(), one_.Weights()) << "after step " << window;
  }
}

TEST_P(JointDeterministicTest, AFlushThatWasAbortedChangesNoBit) {
  for (Trainer* const trainer : {&one_, &all_}) trainer->Compute(1);
  const std::vector<float> half = all_.Gradient(all_.Flush());
  EXPECT_EQ(half, one_.Gradient(one_.Flush()));
  for (Trainer* const trainer : {&one_, &all_}) {
    ReplicaServers& servers = trainer->servers().all();
    ASSERT_TRUE(servers.Abort(servers.at(0).head()->Info().flush_id).ok());
    trainer->Compute(2);
  }
  const FlushInfo flush = all_.Flush();
  const std::vector<float> all = all_.Gradient(flush);
  EXPECT_NE(all, half);
  EXPECT_EQ(all, one_.Gradient(one_.Flush()));
  for (Trainer* const trainer : {&one_, &all_}) {
    ReplicaServers& servers = trainer->servers().all();
    ASSERT_TRUE(servers.Commit(servers.at(0).head()->Info().flush_id).ok());
    trainer->Compute(3);
    trainer->Step();
  }
  EXPECT_EQ(all_.Weights(), one_.Weights());
}

TEST_P(JointDeterministicTest, AWindowIsSavedWhenNoSessionHasAddedToIt) {
  all_.Compute(1);
  const absl::Status refused = all_.servers().Save("a").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("save it when the window has ended"));
  all_.Step();
  ASSERT_TRUE(all_.servers().Save("a").ok());
  all_.Compute(2);
  all_.Step();
  const std::vector<float> expected = all_.Weights();
  // Twice, the second time with what the first has left.
  for (int time = 0; time < 2; ++time) {
    ASSERT_EQ(all_.servers().Restore("a").status(), absl::OkStatus());
    all_.Disconnect();
    EXPECT_NE(all_.Weights(), expected);
    all_.Compute(2);
    all_.Step();
    EXPECT_EQ(all_.Weights(), expected);
  }
}

TEST_P(JointDeterministicTest, WhatALossHasUndoneIsComputedToTheSameBits) {
  all_.Compute(1);
  all_.Step();
  ASSERT_TRUE(all_.servers().Save("a").ok());
  all_.Compute(2);
  all_.Compute(3);
  all_.Step();
  const std::vector<float> expected = all_.Weights();
  all_.Compute(4);
  all_.Disconnect();
  all_.servers().set().Replace(1);
  all_.servers().set().AwaitWhole();
  all_.Compute(2);
  all_.Compute(3);
  all_.Step();
  EXPECT_EQ(all_.Weights(), expected);
}

INSTANTIATE_TEST_SUITE_P(Replicas, JointDeterministicTest,
                         ::testing::Values(SetSize{2}, SetSize{3}, SetSize{2, 2}));

}  // namespace
}  // namespace lossd::rpc::replica_set_test
