// A flush, or a look, is of the windows of all replicas: it has the gradient of one server that was given all
// batches, and ends everywhere alike.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "server/engine/device/gradient_summary.h"
#include "tests/unit/engine/replicas/replica_servers.h"

namespace lossd::engine::joint_flush_test {
namespace {

using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;
using testing::ReplicaServers;

struct Flushed {
  int32_t replicas;
  bool optimizer = false;
  bool bias = false;
  bool double_buffer = false;
  int32_t ranks = 1;  // of each replica

  HeadConfig config() const {
    HeadConfig config = optimizer ? ReplicaServers::AdamWHead() : ReplicaServers::FlushedHead();
    config.bias = bias;
    config.double_buffer = double_buffer;
    return config;
  }
};
void PrintTo(const Flushed& flushed, std::ostream* out) {
  *out << flushed.replicas << " replicas" << (flushed.optimizer ? ", AdamW" : "")
       << (flushed.bias ? ", a bias" : "") << (flushed.double_buffer ? ", a second gradient" : "") << ", "
       << flushed.ranks << " ranks each";
}

class JointFlushTest : public ::testing::TestWithParam<Flushed> {
 protected:
  int32_t replicas() const { return GetParam().replicas; }

  // A batch at each replica, and all of them at the one server.
  void ComputeEverywhere(uint64_t generation, uint64_t more = 0) {
    for (int32_t replica = 0; replica < replicas(); ++replica) {
      const uint64_t seed = 100 * generation + static_cast<uint64_t>(replica) + more;
      servers_.at(replica).Compute(seed, 3 + replica, generation);
      one_.at(0).Compute(seed, 3 + replica, generation);
    }
  }
  void ExpectGeneration(uint64_t generation) {
    for (int32_t replica = 0; replica < replicas(); ++replica) {
      EXPECT_EQ(servers_.at(replica).generation(), generation) << "at replica " << replica;
    }
  }

  ReplicaServers servers_{testing::SetSize{replicas(), GetParam().ranks}, GetParam().config()};
  ReplicaServers one_{1, GetParam().config()};
};

TEST_P(JointFlushTest, ItHasTheGradientOfOneServerWithAllBatches) {
  for (uint64_t generation = 1; generation <= 3; ++generation) {
    ComputeEverywhere(generation);
    const absl::StatusOr<FlushInfo> together = servers_.Flush(generation, 0.5F);
    const absl::StatusOr<FlushInfo> alone = one_.Flush(generation, 0.5F);
    ASSERT_TRUE(together.ok()) << together.status();
    EXPECT_EQ(together->window_tokens, alone->window_tokens);
    EXPECT_EQ(together->rows, alone->rows);
    EXPECT_EQ(together->columns, alone->columns);
    EXPECT_NEAR(together->stats.norm, alone->stats.norm, 1e-6 * alone->stats.norm);
    EXPECT_NEAR(together->stats.bias_norm, alone->stats.bias_norm, 1e-6 * alone->stats.norm);
    EXPECT_EQ(together->stats.bias_norm > 0, GetParam().bias);
    EXPECT_EQ(together->stats.non_finite, 0);
    EXPECT_THAT(*servers_.Gradient(together->flush_id),
                Pointwise(FloatNear(1e-5F), *one_.Gradient(alone->flush_id)));
    EXPECT_EQ(*servers_.Commit(together->flush_id), generation + 1);
    EXPECT_EQ(*servers_.Commit(together->flush_id), generation + 1) << "a repeated commit answers the same";
    ASSERT_TRUE(one_.Commit(alone->flush_id).ok());
    ExpectGeneration(generation + 1);
    EXPECT_TRUE(absl::IsAborted(servers_.Gradient(together->flush_id).status())) << "it is over";
  }
}

TEST_P(JointFlushTest, AnAbortChangesNothingAndIsAnsweredAgain) {
  ComputeEverywhere(1);
  const std::string aborted = servers_.Flush(1)->flush_id;
  EXPECT_EQ(*servers_.Abort(aborted), 1U);
  EXPECT_EQ(*servers_.Abort(aborted), 1U);
  EXPECT_TRUE(absl::IsAborted(servers_.Commit(aborted).status()));
  ExpectGeneration(1);
  ComputeEverywhere(1, 50);
  const absl::StatusOr<FlushInfo> together = servers_.Flush(1);
  const absl::StatusOr<FlushInfo> alone = one_.Flush(1);
  ASSERT_TRUE(together.ok()) << together.status();
  EXPECT_EQ(together->window_tokens, alone->window_tokens);
  EXPECT_THAT(*servers_.Gradient(together->flush_id),
              Pointwise(FloatNear(1e-5F), *one_.Gradient(alone->flush_id)));
}

TEST_P(JointFlushTest, TheSameCallGetsTheSameFlush) {
  ComputeEverywhere(1);
  const std::vector<SessionMarks> marks = servers_.Marks();
  auto first = servers_.BeginFlush(1, marks);
  auto second = servers_.BeginFlush(1, marks);
  const absl::StatusOr<FlushInfo> flush = ReplicaServers::Answer(std::move(first));
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(ReplicaServers::Answer(std::move(second))->flush_id, flush->flush_id);
  const absl::StatusOr<FlushInfo> later = ReplicaServers::Answer(servers_.BeginFlush(1, marks));
  EXPECT_EQ(later->flush_id, flush->flush_id);
  EXPECT_EQ(later->stats.norm, flush->stats.norm);
  EXPECT_FALSE(ReplicaServers::Answer(servers_.BeginFlush(1, marks, 2)).ok()) << "with another scale";
}

TEST_P(JointFlushTest, MarksThatOneReplicaRefusesChangeNothingAnywhere) {
  ComputeEverywhere(1);
  const std::vector<SessionMarks> before = servers_.Marks();
  servers_.at(replicas() - 1).Compute(8, 3);
  const absl::Status refused = ReplicaServers::Answer(servers_.BeginFlush(1, before)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), HasSubstr(before.back().session_id));
  for (int32_t replica = 0; replica < replicas(); ++replica) servers_.at(replica).Compute(9, 2);
  EXPECT_TRUE(servers_.Flush(1).ok());
}

TEST_P(JointFlushTest, AWindowWithoutATokenIsOfZeros) {
  const absl::StatusOr<FlushInfo> flush = servers_.Flush(1);
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->window_tokens, 0U);
  EXPECT_EQ(flush->stats.norm, 0);
  EXPECT_THAT(*servers_.Gradient(flush->flush_id), ::testing::Each(0.0F));
  EXPECT_EQ(*servers_.Commit(flush->flush_id), 2U);
}

TEST_P(JointFlushTest, OnlyTheCoordinatorFlushes) {
  absl::Status refused;
  const std::shared_ptr<Head> head = servers_.at(1).head();
  head->BeginFlush(1, {}, 1, [&](const auto& flush) { refused = flush.status(); });
  EXPECT_THAT(refused.message(), HasSubstr("replica 0"));
  head->CommitFlush("f", [&](const auto& generation) { refused = generation.status(); });
  EXPECT_THAT(refused.message(), HasSubstr("replica 0"));
  EXPECT_THAT(head->CheckFlush("f").message(), HasSubstr("replica 0"));
  head->ReadStats(1, {}, 1, [&](const auto& stats) { refused = stats.status(); });
  EXPECT_THAT(refused.message(), HasSubstr("replica 0"));
}

TEST_P(JointFlushTest, StatisticsAreThoseOfOneServerAndChangeNothing) {
  ComputeEverywhere(1);
  for (const std::vector<SessionMarks>& marks : {servers_.Marks(), std::vector<SessionMarks>()}) {
    const absl::StatusOr<WindowStats> together = servers_.Stats(1, marks, 0.25);
    const absl::StatusOr<WindowStats> alone = one_.Stats(1, marks.empty() ? marks : one_.Marks(), 0.25);
    ASSERT_TRUE(together.ok()) << together.status();
    EXPECT_EQ(together->window_tokens, alone->window_tokens);
    EXPECT_NEAR(together->gradient.norm, alone->gradient.norm, 1e-6 * alone->gradient.norm);
    EXPECT_NEAR(together->gradient.bias_norm, alone->gradient.bias_norm, 1e-6 * alone->gradient.norm);
    EXPECT_NEAR(together->gradient.largest, alone->gradient.largest, 1e-5F);
  }
  ExpectGeneration(1);
  ComputeEverywhere(1, 50);
  const absl::StatusOr<FlushInfo> together = servers_.Flush(1);
  ASSERT_TRUE(together.ok()) << together.status();
  EXPECT_THAT(*servers_.Gradient(together->flush_id),
              Pointwise(FloatNear(1e-5F), *one_.Gradient(one_.Flush(1)->flush_id)));
  EXPECT_FALSE(servers_.Stats(1, {}).ok()) << "a flush has told them";
}

TEST_P(JointFlushTest, StatisticsOfOtherMarksThanThereAreAreRefused) {
  ComputeEverywhere(1);
  const std::vector<SessionMarks> before = servers_.Marks();
  servers_.at(replicas() - 1).Compute(8, 3);
  EXPECT_EQ(servers_.Stats(1, before).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(servers_.Stats(1, servers_.Marks()).ok());
}

TEST_P(JointFlushTest, CallsThatComeDuringALookWaitForIt) {
  ComputeEverywhere(1);
  const std::vector<SessionMarks> marks = servers_.Marks();
  std::vector<std::future<absl::StatusOr<WindowStats>>> looks;
  std::vector<std::promise<absl::StatusOr<WindowStats>>> answers(5);
  for (auto& answer : answers) {
    looks.push_back(answer.get_future());
    servers_.at(0).head()->ReadStats(1, marks, 1, [&answer](const auto& stats) { answer.set_value(stats); });
  }
  const absl::StatusOr<FlushInfo> flush = ReplicaServers::Answer(servers_.BeginFlush(1, marks));
  ASSERT_TRUE(flush.ok()) << flush.status();
  for (auto& look : looks) {
    const absl::StatusOr<WindowStats> stats = look.get();
    // The flush may have begun before those that waited as it did.
    if (stats.ok()) {
      EXPECT_EQ(stats->window_tokens, flush->window_tokens);
    } else {
      EXPECT_THAT(stats.status().message(), HasSubstr("sealed by a flush"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, JointFlushTest,
                         ::testing::Values(Flushed{2}, Flushed{3}, Flushed{4, false, true}, Flushed{2, true},
                                           Flushed{3, true, true}, Flushed{2, false, false, true},
                                           Flushed{3, true, true, true}, Flushed{2, false, true, false, 2},
                                           Flushed{3, true, true, false, 2}));

// While a flush holds the window of a head with a second gradient, the next one begins at each replica.
class DoubleBufferTest : public ::testing::TestWithParam<int32_t> {
 protected:
  void ComputeEverywhere(uint64_t generation) {
    for (int32_t replica = 0; replica < GetParam(); ++replica) {
      const uint64_t seed = 100 * generation + static_cast<uint64_t>(replica);
      servers_.at(replica).Compute(seed, 3 + replica, generation);
      one_.at(0).Compute(seed, 3 + replica, generation);
    }
  }
  const Flushed head_{GetParam(), true, true, true};
  ReplicaServers servers_{GetParam(), head_.config()};
  ReplicaServers one_{1, head_.config()};
};

TEST_P(DoubleBufferTest, TheNextWindowBeginsWhileAFlushHoldsThisOne) {
  ComputeEverywhere(1);
  for (uint64_t generation = 1; generation <= 3; ++generation) {
    const std::string together = servers_.Flush(generation)->flush_id;
    const std::string alone = one_.Flush(generation)->flush_id;
    ComputeEverywhere(generation + 1);
    EXPECT_THAT(*servers_.Gradient(together), Pointwise(FloatNear(1e-5F), *one_.Gradient(alone)));
    EXPECT_EQ(*servers_.Commit(together), generation + 1);
    ASSERT_TRUE(one_.Commit(alone).ok());
  }
  ASSERT_TRUE(servers_.Step(4, {.learning_rate = 1e-2}).ok());
  ASSERT_TRUE(one_.Step(4, {.learning_rate = 1e-2}).ok());
  EXPECT_THAT(servers_.at(0).Weights(), Pointwise(FloatNear(1e-5F), one_.at(0).Weights()));
}

TEST_P(DoubleBufferTest, AnAbortAddsWhatTheNextWindowHasTaken) {
  ComputeEverywhere(1);
  const std::string aborted = servers_.Flush(1)->flush_id;
  const std::string alone = one_.Flush(1)->flush_id;
  ComputeEverywhere(2);
  EXPECT_EQ(*servers_.Abort(aborted), 1U);
  ASSERT_TRUE(one_.Abort(alone).ok());
  const absl::StatusOr<FlushInfo> flush = servers_.Flush(1);
  ASSERT_TRUE(flush.ok()) << flush.status();
  const absl::StatusOr<FlushInfo> expected = one_.Flush(1);
  EXPECT_EQ(flush->window_tokens, expected->window_tokens);
  EXPECT_THAT(*servers_.Gradient(flush->flush_id),
              Pointwise(FloatNear(1e-5F), *one_.Gradient(expected->flush_id)));
}

INSTANTIATE_TEST_SUITE_P(Replicas, DoubleBufferTest, ::testing::Values(2, 3));

}  // namespace
}  // namespace lossd::engine::joint_flush_test
