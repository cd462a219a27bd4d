// The CUDA step in fixed segments of the vocabulary: the same bits for any number of ranks. Most tests have
// all ranks on one GPU; the last ones have a GPU for each.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/collectives/nccl_communicator.h"
#include "kernels/cuda/linear_cross_entropy.h"
#include "tests/gpu/cuda_runner.h"
#include "tests/gpu/device_ranks.h"
#include "tests/unit/collectives/ranks.h"
#include "tests/unit/kernels/option_cases.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::cuda_segments_test {
namespace {

using collectives::testing::Rank;
using collectives::testing::RunRanks;
using cuda::LinearCrossEntropy;
using testing::CountDevices;
using testing::CudaOptions;
using testing::CudaOutcome;
using testing::Describe;
using testing::OptionProblem;
using testing::Problem;
using testing::RandomProblem;
using testing::RelativeError;
using testing::RunCudaStep;
using testing::RunOnDevice;
using testing::SameBits;
using testing::SetLogit;
using testing::Shape;

template <class Value>
std::vector<Value> RowsOf(const std::vector<Value>& all, const Shard& shard, int64_t columns) {
  if (all.empty()) return {};
  return {all.begin() + shard.first() * columns, all.begin() + shard.end() * columns};
}

// One rank's step in fixed segments.
CudaOutcome RunShard(const Problem& problem, const Shard& shard, CudaOptions options) {
  options.shard = &shard;
  options.initial_dw = RowsOf(options.initial_dw, shard, problem.shape.hidden);
  CudaOutcome outcome = RunCudaStep(testing::ShardOf(problem, shard), options);
  EXPECT_EQ(outcome.error, "");
  EXPECT_EQ(outcome.touched, "") << "its guard area was written to";
  return outcome;
}

CudaOutcome RunOnOneRank(const Problem& problem, const CudaOptions& options = {}) {
  const ShardLayout layout(problem.shape.vocab, 1);
  return RunShard(problem, layout.ShardOf(0, Segments::kFixed, nullptr), options);
}

struct Over {
  int32_t ranks = 1;
  int32_t answering_rank = 0;
  std::vector<int32_t> first_segments{};  // empty: as a layout has them
};

// What ranks that share this GPU have between them: dW and db in their order, the rest of the one that
// answers.
CudaOutcome RunOver(const Over& over, const Problem& problem, const CudaOptions& options = {}) {
  const ShardLayout layout(problem.shape.vocab, over.ranks);
  std::vector<CudaOutcome> of_ranks(static_cast<size_t>(over.ranks));
  RunOnDevice(over.ranks, [&](int32_t rank, collectives::Communicator& communicator) {
    Shard shard = layout.ShardOf(rank, Segments::kFixed, &communicator);
    if (!over.first_segments.empty()) shard.first_segments = over.first_segments;
    shard.answering_rank = over.answering_rank;
    of_ranks[static_cast<size_t>(rank)] = RunShard(problem, shard, options);
  });
  CudaOutcome all = of_ranks[static_cast<size_t>(over.answering_rank)];
  all.dw.clear();
  all.db.clear();
  all.rows_redone = 0;
  for (const CudaOutcome& own : of_ranks) {
    all.dw.insert(all.dw.end(), own.dw.begin(), own.dw.end());
    all.db.insert(all.db.end(), own.db.begin(), own.db.end());
    all.rows_redone += own.rows_redone;
  }
  return all;
}

void ExpectSameTokens(const CudaOutcome& actual, const CudaOutcome& expected) {
  EXPECT_EQ(actual.predictions, expected.predictions);
  EXPECT_EQ(actual.ranks, expected.ranks);
  EXPECT_EQ(actual.top_tokens, expected.top_tokens);
}

void ExpectSameBits(const CudaOutcome& actual, const CudaOutcome& expected) {
  EXPECT_TRUE(SameBits(actual.losses, expected.losses)) << "losses";
  EXPECT_TRUE(SameBits(actual.log_sum_exps, expected.log_sum_exps)) << "log-sum-exps";
  EXPECT_TRUE(SameBits(actual.z_losses, expected.z_losses)) << "z-losses";
  EXPECT_TRUE(SameBits(actual.log_probabilities, expected.log_probabilities)) << "log-probabilities";
  EXPECT_TRUE(SameBits(actual.dx, expected.dx)) << "dX";
  EXPECT_TRUE(SameBits(actual.dw, expected.dw)) << "dW";
  EXPECT_TRUE(SameBits(actual.db, expected.db)) << "db";
  EXPECT_TRUE(SameBits(actual.divergences, expected.divergences)) << "divergences";
  EXPECT_TRUE(SameBits(actual.entropies, expected.entropies)) << "entropies";
  EXPECT_TRUE(SameBits(actual.top_log_probabilities, expected.top_log_probabilities)) << "top";
  ExpectSameTokens(actual, expected);
}

// On one rank and on so many others.
void ExpectSameBitsOver(const std::vector<int32_t>& numbers, const Problem& problem,
                        const CudaOptions& options = {}) {
  const CudaOutcome one = RunOnOneRank(problem, options);
  for (const int32_t ranks : numbers) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    ExpectSameBits(RunOver({.ranks = ranks}, problem, options), one);
  }
}

void ExpectClose(const CudaOutcome& actual, const CudaOutcome& expected, double tolerance) {
  const auto close = [](const std::vector<float>& a, const std::vector<float>& b, double limit,
                        const char* what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    if (b.empty()) return;
    EXPECT_LT(RelativeError(a, std::vector<double>(b.begin(), b.end())), limit) << what;
  };
  close(actual.losses, expected.losses, 1e-5, "losses");
  close(actual.log_sum_exps, expected.log_sum_exps, 1e-5, "log-sum-exps");
  close(actual.dx, expected.dx, tolerance, "dX");
  close(actual.dw, expected.dw, tolerance, "dW");
  close(actual.db, expected.db, 3 * tolerance, "db");
  if (!expected.entropies.empty()) close(actual.entropies, expected.entropies, 1e-5, "entropies");
  if (!expected.divergences.empty()) close(actual.divergences, expected.divergences, 2e-5, "divergences");
}

std::vector<float> Varied(int64_t count, float from, float step) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(from + step * static_cast<float>(i % 11));
  return values;
}

// What a batch may ask for.
std::vector<OptionProblem> Cases(DataType type, const Shape& shape) {
  const Problem plain = RandomProblem({.shape = shape, .type = type, .logit_deviation = 2.0});
  std::vector<OptionProblem> cases;
  for (const testing::OptionCase& options : testing::OptionPaths()) {
    cases.push_back({options.name, plain});
    options.set(cases.back().problem);
  }
  return cases;
}

TEST(CudaSegmentMemory, IsTheSameForAnyNumberOfRanks) {
  for (const int64_t vocab : {8, 700, 131072}) {
    const ShardLayout one(vocab, 1);
    const Shard alone = one.ShardOf(0, Segments::kFixed, nullptr);
    const cuda::HeadShape whole{vocab, 72, DataType::kBFloat16};
    const int64_t bytes = LinearCrossEntropy::WorkspaceBytes(whole, alone, 300);
    EXPECT_GE(LinearCrossEntropy::RowsWithin(whole, alone, bytes), 256);
    for (int32_t ranks = 2; ranks <= kMostRanks; ++ranks) {
      const ShardLayout layout(vocab, ranks);
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const Shard shard = layout.ShardOf(rank, Segments::kFixed, nullptr);
        const cuda::HeadShape part{layout.rows(rank), 72, DataType::kBFloat16};
        EXPECT_EQ(LinearCrossEntropy::WorkspaceBytes(part, shard, 300), bytes);
      }
    }
  }
}

class CudaSegments : public ::testing::TestWithParam<DataType> {
 protected:
  void SetUp() override {
    static const int devices = CountDevices();
    if (devices < 1) GTEST_SKIP() << "here is no GPU";
    devices_ = devices;
  }
  static DataType type() { return GetParam(); }
  static Problem Random(const Shape& shape, double deviation = 2.0) {
    return RandomProblem({.shape = shape, .type = type(), .logit_deviation = deviation});
  }
  // In a process of its own, so that others can use CUDA too.
  static void OnOneGpu(const std::function<void()>& body) {
    RunRanks(1, [&](Rank&) {
      // Other GPUs have no such step.
      if (testing::CanRun(cuda::Path::kHopper, type())) body();
    });
  }

  int devices_ = 0;
};

TEST_P(CudaSegments, HaveTheSameBitsForAnyNumberOfRanks) {
  OnOneGpu([] {
    for (const auto& [name, problem] : Cases(type(), {150, 700, 72})) {
      SCOPED_TRACE(name);
      ExpectSameBitsOver({2, 3, 4, 5, 6, 7, 8}, problem, {.tile_rows = 64});
    }
  });
}

TEST_P(CudaSegments, HaveTheSameBitsInOtherShapes) {
  OnOneGpu([] {
    for (const Shape& shape : {Shape{1, 8, 1}, Shape{7, 257, 33}, Shape{425, 777, 123}, Shape{513, 4099, 264},
                               Shape{300, 9000, 136}, Shape{9, 50257, 71}}) {
      SCOPED_TRACE(Describe(shape));
      ExpectSameBitsOver({2, 3, 5, 8}, Random(shape));
    }
  });
}

TEST_P(CudaSegments, MayBeEmpty) {
  OnOneGpu([] {
    for (const auto& [vocab, numbers] : std::vector<std::pair<int64_t, std::vector<int32_t>>>{
             {1, {}}, {2, {2}}, {3, {2, 3}}, {6, {2, 4, 6}}}) {
      for (const auto& [name, problem] : Cases(type(), {70, vocab, 64})) {
        SCOPED_TRACE(std::string(name) + ", entries: " + std::to_string(vocab));
        ExpectSameBitsOver(numbers, problem, {.tile_rows = 40});
        if (vocab > 1) ExpectClose(RunOnOneRank(problem), RunCudaStep(problem), 1e-2);
      }
    }
  });
}

TEST_P(CudaSegments, MayLieOnRanksInAnyWayAndAnyMayAnswer) {
  OnOneGpu([] {
    const Problem problem = Random({150, 700, 72});
    const Problem odd = Random({50, 700, 71});
    for (const DataType dx_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      CudaOptions options{
          .tile_rows = 64, .weight_gradient = WeightGradient::kAccumulate, .dx_type = dx_type};
      options.initial_dw.assign(700 * 72, 0.25f);
      const CudaOutcome one = RunOnOneRank(problem, options);
      const CudaOutcome odd_one = RunOnOneRank(odd, {.dx_type = dx_type});
      // Ranks that have several unsummed parts, a pair's halves and more than half of all.
      for (const std::vector<int32_t>& first_segments : std::vector<std::vector<int32_t>>{
               {0, 3, 8}, {0, 1, 8}, {0, 5, 8}, {0, 7, 8}, {0, 3, 5, 8}, {0, 1, 7, 8}}) {
        const auto ranks = static_cast<int32_t>(first_segments.size()) - 1;
        for (int32_t answering = 0; answering < ranks; ++answering) {
          SCOPED_TRACE("first segments up to " + std::to_string(first_segments[1]) + ", rank " +
                       std::to_string(answering) + " of " + std::to_string(ranks) + " answers");
          const Over over{ranks, answering, first_segments};
          ExpectSameBits(RunOver(over, problem, options), one);
          ExpectSameBits(RunOver(over, odd, {.dx_type = dx_type}), odd_one);
        }
      }
    }
  });
}

// Which is close to the CPU: cuda_options_test.cc.
TEST_P(CudaSegments, AreCloseToOneProduct) {
  OnOneGpu([] {
    const double tolerance = type() == DataType::kBFloat16 ? 4e-3 : 1e-3;
    for (const auto& [name, problem] : Cases(type(), {150, 700, 72})) {
      SCOPED_TRACE(name);
      const CudaOutcome one = RunOnOneRank(problem, {.tile_rows = 64});
      ExpectClose(one, RunCudaStep(problem), tolerance);
    }
  });
}

TEST_P(CudaSegments, DependOnNoExponentAndOnNothingElseThatIsAskedFor) {
  OnOneGpu([] {
    const Problem problem = Random({150, 700, 72});
    const CudaOutcome one = RunOnOneRank(problem, {.tile_rows = 64});
    ExpectSameBits(RunOnOneRank(problem, {.tile_rows = 64}), one);
    ExpectSameBits(RunOnOneRank(problem, {.tile_rows = 64, .exponent_bias = -20}), one);
    const CudaOutcome weights = RunOver({.ranks = 3}, problem, {.tile_rows = 64, .dx_wanted = false});
    EXPECT_TRUE(SameBits(weights.losses, one.losses));
    EXPECT_TRUE(SameBits(weights.dw, one.dw));
    const CudaOutcome losses = RunOnOneRank(
        problem, {.tile_rows = 64, .weight_gradient = WeightGradient::kNone, .dx_wanted = false});
    EXPECT_TRUE(SameBits(losses.losses, one.losses));
  });
}

TEST_P(CudaSegments, DoRowsAgainEachForItself) {
  OnOneGpu([] {
    Problem problem = Random({90, 5000, 64}, 1.0);
    // Not one of a sample of any segment.
    SetLogit(problem, 3, 13, 150.0f);
    SetLogit(problem, 40, 4987, 120.0f);
    SetLogit(problem, 60, 31, 90.0f);
    problem.labels[60] = 31;
    const CudaOutcome one = RunOnOneRank(problem);
    // An estimate is made for bf16 alone.
    EXPECT_EQ(one.rows_redone, type() == DataType::kBFloat16 ? 2 : 0);
    for (const int32_t ranks : {2, 3, 8}) {
      SCOPED_TRACE(ranks);
      const CudaOutcome several = RunOver({.ranks = ranks}, problem);
      ExpectSameBits(several, one);
      EXPECT_EQ(several.rows_redone, one.rows_redone);
    }
  });
}

TEST_P(CudaSegments, MayLieFarApart) {
  OnOneGpu([] {
    for (const float distance : {5.0f, 60.0f, 300.0f, 3000.0f}) {
      SCOPED_TRACE(distance);
      Problem problem = Random({90, 500, 64});
      problem.bias.assign(500, 0.0f);
      for (size_t v = 0; v < 250; ++v) problem.bias[v] = distance;
      ExpectSameBitsOver({2, 5, 8}, problem);
    }
  });
}

// What makes a row overflow may be seen by one rank of several, or by one that has all entries.
TEST_P(CudaSegments, AgreeOnRowsThatOverflow) {
  OnOneGpu([] {
    for (const int64_t tokens : {1, 90}) {
      Problem problem = Random({tokens, 500, 64});
      problem.bias = Varied(500, -1.0f, 0.2f);
      auto x = problem.HiddenStates();
      if (type() == DataType::kBFloat16) {
        std::vector<float> weight = problem.Weight();
        weight[499 * 64] = 1e30f;
        problem.weight = testing::Narrowed(type(), weight);
        x[0] = 1e30f;
      } else {
        x[0] = std::numeric_limits<float>::infinity();
      }
      if (tokens > 1) x[66 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
      problem.hidden_type = DataType::kFloat32;
      problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
      const CudaOutcome one = RunOnOneRank(problem, {.tile_rows = 40});
      EXPECT_TRUE(std::isnan(one.losses[0]));
      EXPECT_TRUE(std::isnan(one.losses[tokens > 1 ? 66 : 0]));
      ExpectSameBitsOver({2, 3, 8}, problem, {.tile_rows = 40});
    }
    // Weights and bias come near to what overflows in different segments, and either together or not at all.
    if (type() != DataType::kBFloat16) return;
    for (const float share : {0.3f, 0.6f}) {
      Problem problem = Random({3, 500, 64});
      std::vector<float> weight = problem.Weight();
      weight[0] = share * 0x1p60f;
      problem.weight = testing::Narrowed(type(), weight);
      auto x = problem.HiddenStates();
      x[0] = 0x1p60f;
      problem.hidden_states = testing::Narrowed(type(), x);
      problem.bias.assign(500, 0.0f);
      problem.bias[499] = share * 0x1p126f;
      ExpectSameBitsOver({2, 8}, problem);
    }
  });
}

TEST_P(CudaSegments, TellWholeRowsInTheSameBits) {
  OnOneGpu([] {
    for (const auto& [name, problem] : Cases(type(), {150, 700, 72})) {
      SCOPED_TRACE(name);
      const CudaOptions options{.tile_rows = 64, .whole_rows = true, .top_k = 9};
      ExpectSameBitsOver({2, 3, 5, 8}, problem, options);
      const CudaOutcome one = RunOnOneRank(problem, options);
      const CudaOutcome whole = RunCudaStep(problem, {.whole_rows = true, .top_k = 9});
      ExpectSameTokens(one, whole);
      ExpectClose(one, whole, type() == DataType::kBFloat16 ? 4e-3 : 1e-3);
    }
    // Segments with fewer entries than tokens are asked for, and more rows than are told of at once.
    for (const auto& [shape, top_k] :
         std::vector<std::pair<Shape, int32_t>>{{{1, 8, 1}, 8}, {{7, 257, 33}, 64}, {{2300, 300, 40}, 3}}) {
      SCOPED_TRACE(Describe(shape));
      const CudaOptions options{.whole_rows = true, .top_k = top_k};
      ExpectSameBitsOver({2, 3, 8}, Random(shape), options);
      ExpectSameTokens(RunOnOneRank(Random(shape), options), RunCudaStep(Random(shape), options));
    }
  });
}

TEST_P(CudaSegments, TellWholeRowsWhereSomeAreEmpty) {
  OnOneGpu([] {
    for (const auto& [vocab, numbers] :
         std::vector<std::pair<int64_t, std::vector<int32_t>>>{{1, {}}, {2, {2}}, {3, {2, 3}}, {6, {2, 6}}}) {
      SCOPED_TRACE(vocab);
      const Problem problem = Random({70, vocab, 64});
      const CudaOptions options{.tile_rows = 40, .whole_rows = true, .top_k = static_cast<int32_t>(vocab)};
      ExpectSameBitsOver(numbers, problem, options);
      ExpectSameTokens(RunOnOneRank(problem, options), RunCudaStep(problem, options));
    }
  });
}

TEST_P(CudaSegments, TakeSoftTargetsInTheSameBits) {
  OnOneGpu([] {
    const double tolerance = type() == DataType::kBFloat16 ? 4e-3 : 1e-3;
    for (const Divergence divergence : testing::kDivergences) {
      // None of the other options, all, and some.
      for (const int combination : {0, testing::kAllSoftOptions, 6, 41}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + ", options " +
                     std::to_string(combination));
        Problem problem = testing::SoftProblem({60, 700, 40}, type(), divergence);
        testing::UseWithSoftTargets(problem, combination);
        if (combination % 2 == 1) problem.bias = problem.teacher->bias = Varied(700, -1.0f, 0.2f);
        for (const bool told : {false, true}) {
          const CudaOptions options{.tile_rows = 33, .whole_rows = told, .top_k = told ? 5 : 0};
          ExpectSameBitsOver({2, 3, 8}, problem, options);
          const CudaOutcome one = RunOnOneRank(problem, options);
          const CudaOutcome whole = RunCudaStep(problem, {.whole_rows = told, .top_k = told ? 5 : 0});
          ExpectClose(one, whole, tolerance);
          ExpectSameTokens(one, whole);
        }
      }
      // More rows than logits are held of at once.
      ExpectSameBitsOver({2, 5}, testing::SoftProblem({1100, 600, 72}, type(), divergence));
    }
  });
}

TEST_P(CudaSegments, TakeSoftTargetsWhereSomeAreEmpty) {
  OnOneGpu([] {
    for (const Divergence divergence : testing::kDivergences) {
      for (const auto& [vocab, numbers] : std::vector<std::pair<int64_t, std::vector<int32_t>>>{
               {1, {}}, {2, {2}}, {3, {2, 3}}, {6, {2, 6}}}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + ", entries: " + std::to_string(vocab));
        Problem problem = testing::SoftProblem({70, vocab, 64}, type(), divergence);
        testing::UseWithSoftTargets(problem, testing::kAllSoftOptions);
        const CudaOptions options{.tile_rows = 40, .whole_rows = true, .top_k = 1};
        ExpectSameBitsOver(numbers, problem, options);
        if (vocab > 1) ExpectClose(RunOnOneRank(problem, options), RunCudaStep(problem, options), 1e-2);
      }
    }
  });
}

TEST_P(CudaSegments, AgreeOnRowsOfSoftTargetsThatOverflow) {
  OnOneGpu([] {
    for (const Divergence divergence : testing::kDivergences) {
      Problem problem = Random({50, 500, 64});
      problem.teacher = testing::RandomTeacher(
          problem.shape,
          {.hidden = 40, .type = DataType::kBFloat16, .distillation = {.divergence = divergence}});
      const auto set = [](std::vector<unsigned char>& values, int64_t place, float value) {
        const std::vector<unsigned char> narrow = testing::Narrowed(DataType::kBFloat16, {value});
        std::copy(narrow.begin(), narrow.end(), values.begin() + place * std::ssize(narrow));
      };
      for (int64_t row = 0; row < 50; ++row) set(problem.teacher->hidden_states, row * 40, 0.0f);
      // On all ranks, and by the weights of one segment alone.
      set(problem.teacher->hidden_states, 9 * 40, std::numeric_limits<float>::infinity());
      set(problem.teacher->weight, 499 * 40, 1e30f);
      set(problem.teacher->hidden_states, 17 * 40, 1e30f);
      const CudaOptions options{.tile_rows = 40, .whole_rows = true, .top_k = 2};
      const CudaOutcome one = RunOnOneRank(problem, options);
      for (const size_t row : {9, 17}) {
        EXPECT_TRUE(std::isnan(one.losses[row])) << row;
        EXPECT_EQ(one.predictions[row], -1) << row;
      }
      ExpectSameBitsOver({2, 3, 8}, problem, options);
    }
  });
}

TEST_P(CudaSegments, AreNotForThePortablePath) {
  OnOneGpu([] {
    const Problem problem = Random({20, 500, 64});
    const ShardLayout layout(500, 1);
    const Shard shard = layout.ShardOf(0, Segments::kFixed, nullptr);
    EXPECT_NE(RunCudaStep(problem, {.path = cuda::Path::kPortable, .shard = &shard}).error, "");
  });
}

// Each GPU has the bits that it has when it is alone.
TEST_P(CudaSegments, HaveTheSameBitsOverGpus) {
  if (devices_ < 2) GTEST_SKIP() << "here is one GPU";
  for (int ranks = 2; ranks <= std::min(devices_, int{kMostRanks}); ++ranks) {
    RunRanks(ranks, [](Rank& rank) {
      std::unique_ptr<collectives::Communicator> communicator;
      const collectives::Result connected = collectives::ConnectNccl(
          {.rank = rank.rank, .size = rank.size, .device = rank.rank, .most_blocks = 2}, rank.rendezvous,
          &communicator);
      ASSERT_TRUE(connected.ok()) << connected.message();
      const ShardLayout layout(700, rank.size);
      for (const auto& [name, problem] : Cases(type(), {150, 700, 72})) {
        const CudaOutcome one = RunOnOneRank(problem, {.tile_rows = 64});
        for (const bool shared : {false, true}) {
          SCOPED_TRACE(std::string(name) + (shared ? ", by copy engines" : ""));
          Shard shard = layout.ShardOf(rank.rank, Segments::kFixed, communicator.get());
          shard.answering_rank = shared ? rank.size - 1 : 0;
          const CudaOutcome own = RunShard(problem, shard, {.tile_rows = 64, .shared = shared});
          EXPECT_TRUE(SameBits(own.dw, RowsOf(one.dw, shard, 72))) << "dW";
          EXPECT_TRUE(SameBits(own.db, RowsOf(one.db, shard, 1))) << "db";
          if (!shard.answers()) continue;
          EXPECT_TRUE(SameBits(own.losses, one.losses)) << "losses";
          EXPECT_TRUE(SameBits(own.dx, one.dx)) << "dX";
        }
      }
    });
  }
}

// Shards of any sizes, so that several parts of dX travel from one rank.
TEST_P(CudaSegments, MayLieOnTwoGpusInAnyWay) {
  if (devices_ < 2) GTEST_SKIP() << "here is one GPU";
  RunRanks(2, [](Rank& rank) {
    std::unique_ptr<collectives::Communicator> communicator;
    ASSERT_TRUE(
        collectives::ConnectNccl({.rank = rank.rank, .size = 2, .device = rank.rank, .most_blocks = 2},
                                 rank.rendezvous, &communicator)
            .ok());
    const Problem problem = Random({150, 700, 72});
    const CudaOutcome one = RunOnOneRank(problem, {.tile_rows = 64});
    const ShardLayout layout(700, 2);
    for (const std::vector<int32_t>& first_segments :
         std::vector<std::vector<int32_t>>{{0, 3, 8}, {0, 1, 8}, {0, 7, 8}}) {
      for (const bool shared : {false, true}) {
        SCOPED_TRACE("segments of rank 0: " + std::to_string(first_segments[1]) +
                     (shared ? ", by copy engines" : ""));
        Shard shard = layout.ShardOf(rank.rank, Segments::kFixed, communicator.get());
        shard.first_segments = first_segments;
        const CudaOutcome own = RunShard(problem, shard, {.tile_rows = 64, .shared = shared});
        EXPECT_TRUE(SameBits(own.dw, RowsOf(one.dw, shard, 72))) << "dW";
        if (!shard.answers()) continue;
        EXPECT_TRUE(SameBits(own.dx, one.dx)) << "dX";
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Types, CudaSegments, ::testing::Values(DataType::kBFloat16, DataType::kFloat16),
                         [](const auto& test) { return std::string(Name(test.param)); });

}  // namespace
}  // namespace lossd::kernels::cuda_segments_test
