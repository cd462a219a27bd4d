// CpuLinearCrossEntropy over ranks, each of which has a part of the vocabulary.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/collectives/communicator.h"
#include "kernels/cpu/arithmetic.h"
#include "kernels/exchange.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/shard.h"
#include "tests/unit/kernels/problem.h"
#include "tests/unit/kernels/soft_problems.h"
#include "tests/unit/kernels/thread_ranks.h"

namespace lossd::kernels::shards_test {
namespace {

using collectives::Communicator;
using testing::Joined;
using testing::OverRanks;
using testing::Problem;
using testing::RandomProblem;
using testing::RelativeError;
using testing::RunOnThreads;
using testing::RunStep;
using testing::RunSteps;
using testing::SameBits;
using testing::SetLogit;
using testing::StepOptions;
using testing::StepResult;

constexpr int64_t kIgnored = -100;

std::vector<double> Wide(const std::vector<float>& values) { return {values.begin(), values.end()}; }

void AddBias(Problem& problem) {
  problem.bias.resize(static_cast<size_t>(problem.shape.vocab));
  for (size_t v = 0; v < problem.bias.size(); ++v) problem.bias[v] = 0.1f * static_cast<float>(v % 13) - 0.5f;
}

// Every combination of options, with every divergence in turn and without soft targets.
std::vector<Problem> ProblemsOf(DataType type) {
  std::vector<Problem> problems;
  for (const int options : testing::SoftOptionPairs()) {
    const size_t kind = problems.size() % 4;
    const testing::Shape shape{17, 1003, 24};
    Problem problem = testing::SoftProblem(shape, type, testing::kDivergences[kind % 3]);
    testing::UseWithSoftTargets(problem, options);
    if (kind == 3) problem.teacher.reset();
    if (options % 2 == 0) AddBias(problem);
    problem.labels[4] = kIgnored;
    problems.push_back(problem);
  }
  return problems;
}

void ExpectSameWithin(double tolerance, const StepResult& result, const StepResult& whole) {
  ASSERT_EQ(result.status, Status::kOk);
  EXPECT_EQ(result.stats.valid_tokens, whole.stats.valid_tokens);
  EXPECT_LT(RelativeError(result.losses, Wide(whole.losses)), tolerance);
  EXPECT_LT(RelativeError(result.log_sum_exp, Wide(whole.log_sum_exp)), tolerance);
  EXPECT_LT(RelativeError(result.z_loss, Wide(whole.z_loss)), tolerance);
  EXPECT_LT(RelativeError(result.log_probability, Wide(whole.log_probability)), tolerance);
  EXPECT_LT(RelativeError(result.top_log_probabilities, Wide(whole.top_log_probabilities)), tolerance);
  EXPECT_LT(RelativeError(result.entropy, Wide(whole.entropy)), tolerance);
  EXPECT_EQ(result.prediction, whole.prediction);
  EXPECT_EQ(result.target_rank, whole.target_rank);
  EXPECT_EQ(result.top_tokens, whole.top_tokens);
  EXPECT_LT(RelativeError(result.dx, Wide(whole.dx)), tolerance);
  EXPECT_LT(RelativeError(result.dw, Wide(whole.dw)), tolerance);
  EXPECT_LT(RelativeError(result.db, Wide(whole.db)), tolerance);
}

void ExpectSameBits(const StepResult& result, const StepResult& expected) {
  ASSERT_EQ(result.status, Status::kOk);
  EXPECT_EQ(result.stats.rows_redone, expected.stats.rows_redone);
  EXPECT_TRUE(SameBits(result.losses, expected.losses));
  EXPECT_TRUE(SameBits(result.log_sum_exp, expected.log_sum_exp));
  EXPECT_TRUE(SameBits(result.z_loss, expected.z_loss));
  EXPECT_TRUE(SameBits(result.log_probability, expected.log_probability));
  EXPECT_TRUE(SameBits(result.top_log_probabilities, expected.top_log_probabilities));
  EXPECT_TRUE(SameBits(result.entropy, expected.entropy));
  EXPECT_EQ(result.prediction, expected.prediction);
  EXPECT_EQ(result.target_rank, expected.target_rank);
  EXPECT_EQ(result.top_tokens, expected.top_tokens);
  EXPECT_TRUE(SameBits(result.dx, expected.dx));
  EXPECT_TRUE(SameBits(result.dw, expected.dw));
  EXPECT_TRUE(SameBits(result.db, expected.db));
}

StepResult RunOne(const Problem& problem, const OverRanks& over, const StepOptions& options = {}) {
  return Joined(RunSteps({problem}, over, options)[0], over);
}

void ExpectSameBitsForEveryNumberOfRanks(const std::vector<Problem>& problems,
                                         const std::vector<int32_t>& numbers, const StepOptions& options) {
  const OverRanks alone{.ranks = 1, .segments = Segments::kFixed};
  const auto expected = RunSteps(problems, alone, options);
  for (const int32_t ranks : numbers) {
    const OverRanks over{.ranks = ranks, .segments = Segments::kFixed, .answering_rank = ranks / 2};
    const auto results = RunSteps(problems, over, options);
    for (size_t i = 0; i < problems.size(); ++i) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, problem " + std::to_string(i));
      const StepResult joined = Joined(results[i], over);
      ExpectSameBits(joined, Joined(expected[i], alone));
      if (!problems[i].teacher.has_value()) continue;
      EXPECT_TRUE(SameBits(joined.divergence, expected[i][0].divergence));
    }
  }
}

class Shards : public ::testing::TestWithParam<DataType> {};

TEST_P(Shards, GiveWhatTheWholeHeadGivesWithEveryOption) {
  const std::vector<Problem> problems = ProblemsOf(GetParam());
  const StepOptions options{.top_k = 6};
  std::vector<StepResult> whole;
  for (const Problem& problem : problems) whole.push_back(RunStep(problem, options));
  const double tolerance = cpu::BestArithmetic(GetParam()) == cpu::Arithmetic::kLibraryBFloat16 ? 4e-3 : 5e-6;
  for (int32_t ranks = 1; ranks <= 4; ++ranks) {
    const OverRanks over{.ranks = ranks, .answering_rank = ranks - 1};
    const auto results = RunSteps(problems, over, options);
    for (size_t i = 0; i < problems.size(); ++i) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, problem " + std::to_string(i));
      const StepResult joined = Joined(results[i], over);
      ExpectSameWithin(tolerance, joined, whole[i]);
      if (!problems[i].teacher.has_value()) continue;
      EXPECT_LT(RelativeError(joined.divergence, Wide(whole[i].divergence)), tolerance);
    }
  }
}

TEST_P(Shards, InFixedSegmentsGiveTheSameBitsForEveryNumberOfRanks) {
  std::vector<Problem> problems = ProblemsOf(GetParam());
  // More rows than travel at once, over blocks of the vocabulary whose last one is short.
  Problem large = RandomProblem({.shape = {300, 5000, 40}, .type = GetParam(), .logit_deviation = 4.0});
  SetLogit(large, 7, 4000, 300.0f);
  problems.push_back(large);
  ExpectSameBitsForEveryNumberOfRanks(problems, {2, 3, 4, 8}, {.dx_type = GetParam(), .top_k = 6});
}

TEST_P(Shards, InFixedSegmentsGiveTheSameBitsInManyTiles) {
  const std::vector<Problem> all = ProblemsOf(GetParam());
  const std::vector<Problem> problems = {all[0], all[7], all[21]};
  ExpectSameBitsForEveryNumberOfRanks(problems, {3, 5, 6, 7, 8}, {.tile_rows = 5, .top_k = 6});
}

INSTANTIATE_TEST_SUITE_P(Types, Shards, ::testing::Values(DataType::kFloat32, DataType::kBFloat16),
                         [](const auto& one) { return std::string(Name(one.param)); });

TEST(ShardsTest, InFixedSegmentsAgreeWithTheReference) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    const Problem problem = RandomProblem({.shape = {30, 2100, 40}, .type = type, .logit_deviation = 3.0});
    const testing::Reference reference = RunReference(problem);
    const StepResult result = RunOne(problem, {.ranks = 3, .segments = Segments::kFixed});
    const double tolerance = cpu::BestArithmetic(type) == cpu::Arithmetic::kLibraryBFloat16 ? 4e-3 : 1e-5;
    EXPECT_LT(RelativeError(result.losses, reference.losses), 1e-5);
    EXPECT_LT(RelativeError(result.dx, reference.dx), tolerance);
    EXPECT_LT(RelativeError(result.dw, reference.dw), tolerance);
  }
}

TEST(ShardsTest, GiveTheSameBitsInTheLibrarysProducts) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    Problem problem = RandomProblem({.shape = {40, 5000, 40}, .type = type, .logit_deviation = 3.0});
    problem.options.label_smoothing = type == DataType::kBFloat16 ? 0.1f : 0.0f;
    const StepOptions options{.arithmetic = type == DataType::kFloat32 ? cpu::Arithmetic::kLibraryFloat32
                                                                       : cpu::Arithmetic::kLibraryBFloat16,
                              .top_k = 3};
    const StepResult whole = RunStep(problem, options);
    if (whole.status == Status::kInternal) continue;  // a processor that has no products in bf16
    const StepResult expected = RunOne(problem, {.ranks = 1, .segments = Segments::kFixed}, options);
    ExpectSameWithin(type == DataType::kFloat32 ? 1e-5 : 4e-3, expected, whole);
    for (const int32_t ranks : {2, 3, 8}) {
      SCOPED_TRACE(std::string(Name(type)) + ", " + std::to_string(ranks) + " ranks");
      ExpectSameBits(RunOne(problem, {.ranks = ranks, .segments = Segments::kFixed}, options), expected);
    }
  }
}

TEST(ShardsTest, OfASmallVocabularyMayHaveSegmentsWithoutEntries) {
  for (const int64_t vocab : {1, 3, 5, 7}) {
    Problem problem = RandomProblem({.shape = {9, vocab, 16}, .logit_deviation = 2.0});
    AddBias(problem);
    problem.options.label_smoothing = 0.1f;
    const StepOptions options{.top_k = static_cast<int32_t>(vocab)};
    const StepResult whole = RunStep(problem, options);
    const StepResult expected = RunOne(problem, {.ranks = 1, .segments = Segments::kFixed}, options);
    for (int32_t ranks = 1; ranks <= vocab; ++ranks) {
      SCOPED_TRACE(std::to_string(vocab) + " entries, " + std::to_string(ranks) + " ranks");
      ExpectSameBits(RunOne(problem, {.ranks = ranks, .segments = Segments::kFixed}, options), expected);
      // One entry has a loss of 0 and no gradient, whose relative error says nothing.
      if (vocab > 1) ExpectSameWithin(1e-5, RunOne(problem, {.ranks = ranks}, options), whole);
    }
  }
}

TEST(ShardsTest, RedoARowInOneSegmentAlone) {
  Problem problem = RandomProblem({.shape = {12, 3000, 40}});
  problem.options.lse_square_scale = 1e-3f;
  // Beyond the first block of the first of two shards, and far above what is in it.
  SetLogit(problem, 5, 700, 150.0f);
  const testing::Reference reference = RunReference(problem);
  for (const Segments segments : {Segments::kOfRanks, Segments::kFixed}) {
    const StepResult result = RunOne(problem, {.ranks = 2, .segments = segments, .answering_rank = 1});
    EXPECT_EQ(result.stats.rows_redone, 1);
    EXPECT_LT(RelativeError(result.losses, reference.losses), 1e-5);
    EXPECT_LT(RelativeError(result.dx, reference.dx), 1e-5);
    EXPECT_LT(RelativeError(result.dw, reference.dw), 1e-5);
  }
}

// The two segments' logits are so far apart, either way round, that no units hold both sums.
TEST(ShardsTest, MayHaveLogitsThatAreFarApart) {
  for (const float value : {3e5f, -3e5f, 1e30f, -1e30f}) {
    SCOPED_TRACE(value);
    Problem problem = RandomProblem({.shape = {4, 2, 8}});
    problem.labels = {0, 1, 0, 1};
    SetLogit(problem, 2, 0, value);
    SetLogit(problem, 3, 0, value);
    const testing::Reference reference = RunReference(problem);
    const StepResult result = RunOne(problem, {.ranks = 2}, {.top_k = 2});
    const StepResult whole = RunStep(problem, {.top_k = 2});
    EXPECT_LT(RelativeError(result.losses, reference.losses), 1e-6);
    EXPECT_LT(RelativeError(result.entropy, Wide(whole.entropy)), 1e-6);
    EXPECT_EQ(result.top_tokens, whole.top_tokens);
    EXPECT_LT(RelativeError(result.dw, reference.dw), 1e-6);
  }
}

TEST(ShardsTest, ARowThatOverflowsInOneOfThemHasOverflowedInAll) {
  Problem problem = RandomProblem({.shape = {10, 900, 40}});
  problem.options.logit_scale = 10.0f;
  SetLogit(problem, 3, 100, 3e38f);
  Problem without = problem;
  without.labels[3] = kIgnored;
  const OverRanks over{.ranks = 2, .answering_rank = 1};
  const StepResult result = RunOne(problem, over, {.top_k = 2});
  const StepResult expected = RunOne(without, over, {.top_k = 2});
  ASSERT_EQ(result.status, Status::kOk);
  EXPECT_TRUE(std::isnan(result.losses[3]));
  EXPECT_TRUE(std::isnan(result.entropy[3]));
  EXPECT_EQ(result.prediction[3], -1);
  EXPECT_EQ(result.top_tokens[7], -1);
  const float* dx = &result.dx[static_cast<size_t>(3 * 40)];
  EXPECT_TRUE(std::all_of(dx, dx + 40, [](float value) { return std::isnan(value); }));
  EXPECT_LT(RelativeError(result.dw, Wide(expected.dw)), 1e-6);
  for (const size_t row : {0U, 2U, 4U, 9U}) EXPECT_EQ(result.losses[row], expected.losses[row]);
}

TEST(ShardsTest, AddToWhatDwHolds) {
  const Problem problem = RandomProblem({.shape = {20, 600, 16}});
  const OverRanks over{.ranks = 2};
  const StepResult fresh = RunOne(problem, over);
  const StepOptions options{.weight_gradient = WeightGradient::kAccumulate,
                            .initial_dw = std::vector<float>(static_cast<size_t>(300 * 16), 0.5f)};
  std::vector<double> expected = Wide(fresh.dw);
  const StepResult added = RunOne(problem, over, options);
  for (double& value : expected) value += 0.5;
  EXPECT_LT(RelativeError(added.dw, expected), 1e-6);
}

TEST(ShardsTest, WithoutValidRowsMakeNoCollectiveCall) {
  Problem problem = RandomProblem({.shape = {5, 100, 8}});
  problem.labels.assign(5, kIgnored);
  RunOnThreads(2, [&](int32_t rank, std::unique_ptr<Communicator>& communicator) {
    communicator->Abort();
    const ShardLayout layout(100, 2);
    const Shard shard = layout.ShardOf(rank, Segments::kFixed, communicator.get());
    const StepResult result = RunStep(problem, {.shard = &shard});
    EXPECT_EQ(result.status, Status::kOk);
    EXPECT_TRUE(std::all_of(result.dw.begin(), result.dw.end(), [](float value) { return value == 0; }));
    if (shard.answers()) {
      EXPECT_EQ(result.losses, std::vector<float>(5, 0.0f));
    }
  });
}

class Exchanges final : public ExchangeObserver {
 public:
  // Each must be over before the next.
  void OnWaiting(Exchange exchange) override {
    EXPECT_FALSE(waiting_.has_value());
    waiting_ = exchange;
  }
  void OnWaited(Exchange exchange, double seconds) override {
    EXPECT_EQ(waiting_, exchange);
    waiting_.reset();
    EXPECT_GT(seconds, 0);
    ++times_[exchange];
  }
  int times(Exchange exchange) { return times_[exchange]; }

 private:
  std::optional<Exchange> waiting_;
  std::map<Exchange, int> times_;
};

TEST(ShardsTest, TellHowLongTheyExchangeWhatRanksFound) {
  const Problem problem = RandomProblem({.shape = {20, 300, 24}});
  RunOnThreads(2, [&](int32_t rank, std::unique_ptr<Communicator>& communicator) {
    Exchanges exchanges;
    const ShardLayout layout(300, 2);
    Shard shard = layout.ShardOf(rank, Segments::kOfRanks, communicator.get());
    shard.observer = &exchanges;
    EXPECT_EQ(RunStep(problem, {.shard = &shard}).status, Status::kOk);
    EXPECT_GT(exchanges.times(Exchange::kRowStatistics), 0);
    EXPECT_GT(exchanges.times(Exchange::kInputGradients), 0);
    EXPECT_EQ(exchanges.times(Exchange::kRows), 0);
  });
}

TEST(ShardsTest, WithOneWorkspaceTooSmallAllFail) {
  const Problem problem = RandomProblem({.shape = {5, 100, 8}});
  RunOnThreads(2, [&](int32_t rank, std::unique_ptr<Communicator>& communicator) {
    const ShardLayout layout(100, 2);
    const Shard shard = layout.ShardOf(rank, Segments::kOfRanks, communicator.get());
    const Problem part = ShardOf(problem, shard);
    LinearCrossEntropyParams params = part.Params();
    const int64_t enough = WorkspaceBytes(1, shard, 8, DataType::kFloat32, nullptr);
    testing::GuardedBytes workspace(enough, 64);
    std::vector<float> losses(5);
    params.shard = &shard;
    params.losses = losses.data();
    params.workspace = workspace.data();
    params.workspace_bytes = rank == 1 ? enough - 1 : enough;
    EXPECT_EQ(CpuLinearCrossEntropy(params, nullptr), Status::kWorkspaceTooSmall);
    params.workspace_bytes = enough;
    EXPECT_EQ(CpuLinearCrossEntropy(params, nullptr), Status::kOk);
  });
}

TEST(ShardsTest, ARankThatDiesInTheMiddleIsToldAsALostRank) {
  const Problem problem = RandomProblem({.shape = {50, 1000, 16}});
  RunOnThreads(3, [&](int32_t rank, std::unique_ptr<Communicator>& communicator) {
    if (rank == 1) {
      // It comes as far as the number of rows of a tile.
      int64_t rows[] = {10};
      EXPECT_TRUE(communicator->AllReduce(collectives::Reduction::kMin, rows, nullptr).ok());
      communicator.reset();
      return;
    }
    const ShardLayout layout(1000, 3);
    const Shard shard = layout.ShardOf(rank, Segments::kFixed, communicator.get());
    EXPECT_EQ(RunStep(problem, {.shard = &shard}).status, Status::kRankLost);
    EXPECT_EQ(communicator->failure().code(), collectives::Code::kPeerLost);
    EXPECT_FALSE(communicator->failure().message().empty());
  });
}

TEST(ShardsTest, ThatDoNotFitTheirParametersAreRefused) {
  const Problem problem = RandomProblem({.shape = {3, 50, 8}});
  const ShardLayout layout(50, 2);
  const Shard without_communicator = layout.ShardOf(0, Segments::kFixed, nullptr);
  EXPECT_EQ(RunStep(problem, {.shard = &without_communicator}).status, Status::kInvalidArgument);
  const ShardLayout alone(50, 1);
  Shard shard = alone.ShardOf(0, Segments::kFixed, nullptr);
  EXPECT_EQ(RunStep(problem, {.shard = &shard}).status, Status::kOk);
  shard.answering_rank = 1;
  EXPECT_EQ(RunStep(problem, {.shard = &shard}).status, Status::kInvalidArgument);
}

TEST(ShardsTest, NeedTheSameWorkspaceForAnyNumberOfRanksInFixedSegments) {
  const TeacherSize teacher{64, DataType::kBFloat16};
  for (const TeacherSize* one : {static_cast<const TeacherSize*>(nullptr), &teacher}) {
    const ShardLayout alone(50257, 1);
    const int64_t bytes =
        WorkspaceBytes(100, alone.ShardOf(0, Segments::kFixed, nullptr), 512, DataType::kBFloat16, one);
    EXPECT_EQ(RowsWithin(bytes, alone.ShardOf(0, Segments::kFixed, nullptr), 512, DataType::kBFloat16, one),
              100);
    for (int32_t ranks = 2; ranks <= kMostRanks; ++ranks) {
      const ShardLayout layout(50257, ranks);
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const Shard fixed = layout.ShardOf(rank, Segments::kFixed, nullptr);
        EXPECT_EQ(WorkspaceBytes(100, fixed, 512, DataType::kBFloat16, one), bytes);
        const Shard of_ranks = layout.ShardOf(rank, Segments::kOfRanks, nullptr);
        EXPECT_EQ(WorkspaceBytes(100, of_ranks, 512, DataType::kBFloat16, one),
                  WorkspaceBytes(100, layout.ShardOf(0, Segments::kOfRanks, nullptr), 512,
                                 DataType::kBFloat16, one));
        EXPECT_LT(WorkspaceBytes(100, of_ranks, 512, DataType::kBFloat16, one), bytes);
      }
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::shards_test
