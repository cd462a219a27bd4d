// CpuLogits over ranks, each of which has a part of the vocabulary.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/collectives/communicator.h"
#include "kernels/logits.h"
#include "kernels/shard.h"
#include "tests/unit/kernels/problem.h"
#include "tests/unit/kernels/thread_ranks.h"

namespace lossd::kernels::sharded_logits_test {
namespace {

using testing::GuardedBytes;
using testing::OverRanks;
using testing::Problem;
using testing::RandomProblem;
using testing::SameBits;

struct Told {
  Status status = Status::kOk;
  std::vector<unsigned char> logits;
  std::vector<int32_t> tokens;
  std::vector<float> top_logits;
  std::vector<float> log_sum_exp;
};

// Without a shard: what the whole head tells.
Told LogitsOf(const Problem& whole, DataType type, int32_t top_k, int64_t tile_rows, const Shard* shard) {
  const auto [rows, vocab, hidden] = whole.shape;
  const Problem problem = shard == nullptr ? whole : ShardOf(whole, *shard);
  const auto head = problem.Params();
  LogitsParams params;
  params.shard = shard;
  params.rows = rows;
  params.vocab = problem.shape.vocab;
  params.hidden = hidden;
  params.weight_type = head.weight_type;
  params.weight = head.weight;
  params.bias = head.bias;
  params.hidden_type = head.hidden_type;
  params.hidden_states = head.hidden_states;
  params.softcap = 8.0f;
  Told told;
  told.logits.resize(static_cast<size_t>(rows * vocab * SizeOf(type)));
  told.tokens.resize(static_cast<size_t>(rows * top_k));
  told.top_logits.resize(static_cast<size_t>(rows * top_k));
  told.log_sum_exp.resize(static_cast<size_t>(rows));
  params.outputs = {
      type, told.logits.data(), top_k, told.tokens.data(), told.top_logits.data(), told.log_sum_exp.data()};
  GuardedBytes workspace(shard == nullptr
                             ? WorkspaceBytes(tile_rows, vocab, hidden, head.weight_type)
                             : WorkspaceBytes(tile_rows, *shard, hidden, head.weight_type, nullptr),
                         64);
  params.workspace = workspace.data();
  params.workspace_bytes = workspace.size();
  told.status = CpuLogits(params);
  EXPECT_TRUE(workspace.Intact());
  return told;
}

Told LogitsOver(const Problem& problem, DataType type, int32_t top_k, int64_t tile_rows,
                const OverRanks& over) {
  Told told;
  const ShardLayout layout(problem.shape.vocab, over.ranks);
  testing::RunOnThreads(over.ranks, [&](int32_t rank, auto& communicator) {
    const Shard shard = ShardOf(layout, over, rank, communicator.get());
    Told of_rank = LogitsOf(problem, type, top_k, tile_rows, &shard);
    EXPECT_EQ(of_rank.status, Status::kOk);
    if (shard.answers()) told = std::move(of_rank);
  });
  return told;
}

TEST(ShardedLogits, AreThoseOfTheWholeHead) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    Problem problem = RandomProblem({.shape = {23, 1003, 40}, .type = type, .logit_deviation = 3.0});
    problem.bias.assign(1003, 0.25f);
    const Told whole = LogitsOf(problem, type, 9, 23, nullptr);
    for (int32_t ranks = 1; ranks <= 4; ++ranks) {
      for (const int64_t tile_rows : {1, 23}) {
        SCOPED_TRACE(std::to_string(ranks) + " ranks");
        const Told told =
            LogitsOver(problem, type, 9, tile_rows, {.ranks = ranks, .answering_rank = ranks / 2});
        EXPECT_EQ(told.logits, whole.logits);
        EXPECT_EQ(told.tokens, whole.tokens);
        EXPECT_TRUE(SameBits(told.top_logits, whole.top_logits));
        for (size_t r = 0; r < 23; ++r) {
          EXPECT_NEAR(told.log_sum_exp[r], whole.log_sum_exp[r], 1e-6 * std::fabs(whole.log_sum_exp[r]));
        }
      }
    }
  }
}

TEST(ShardedLogits, InFixedSegmentsGiveTheSameBitsForEveryNumberOfRanks) {
  const Problem problem = RandomProblem({.shape = {15, 2500, 40}, .logit_deviation = 3.0});
  const Told alone =
      LogitsOver(problem, DataType::kFloat32, 5, 15, {.ranks = 1, .segments = Segments::kFixed});
  for (const int32_t ranks : {2, 3, 4, 8}) {
    const Told told =
        LogitsOver(problem, DataType::kFloat32, 5, 15, {.ranks = ranks, .segments = Segments::kFixed});
    EXPECT_EQ(told.logits, alone.logits);
    EXPECT_EQ(told.tokens, alone.tokens);
    EXPECT_TRUE(SameBits(told.log_sum_exp, alone.log_sum_exp));
  }
}

TEST(ShardedLogits, OfASmallVocabularyAreListedWhole) {
  const Problem problem = RandomProblem({.shape = {4, 5, 8}});
  const Told whole = LogitsOf(problem, DataType::kFloat32, 5, 4, nullptr);
  for (int32_t ranks = 1; ranks <= 5; ++ranks) {
    const Told told =
        LogitsOver(problem, DataType::kFloat32, 5, 4, {.ranks = ranks, .segments = Segments::kFixed});
    EXPECT_EQ(told.tokens, whole.tokens);
    EXPECT_EQ(told.logits, whole.logits);
  }
}

TEST(ShardedLogits, OfARowThatOverflowsInOneShardAreNotListed) {
  Problem problem = RandomProblem({.shape = {3, 100, 8}});
  problem.bias.assign(100, 0.0f);
  problem.bias[80] = INFINITY;
  const Told told = LogitsOver(problem, DataType::kFloat32, 2, 3, {.ranks = 2});
  EXPECT_EQ(told.tokens, std::vector<int32_t>(6, -1));
  for (const float value : told.log_sum_exp) EXPECT_TRUE(std::isnan(value));
}

TEST(ShardedLogits, OfALostRankFail) {
  const Problem problem = RandomProblem({.shape = {3, 100, 8}});
  testing::RunOnThreads(2, [&](int32_t rank, auto& communicator) {
    if (rank == 1) return communicator.reset();
    const ShardLayout layout(100, 2);
    const Shard shard = layout.ShardOf(rank, Segments::kOfRanks, communicator.get());
    EXPECT_EQ(LogitsOf(problem, DataType::kFloat32, 2, 3, &shard).status, Status::kRankLost);
  });
}

}  // namespace
}  // namespace lossd::kernels::sharded_logits_test
