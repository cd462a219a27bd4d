// The CUDA step of a vocabulary over two GPUs against the CPU and against one GPU. A rank is a process.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/collectives/nccl_communicator.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/shared_rows.h"
#include "kernels/cuda/sharded_step.h"
#include "tests/gpu/cuda_runner.h"
#include "tests/gpu/device_ranks.h"
#include "tests/unit/collectives/ranks.h"
#include "tests/unit/kernels/cpu_results.h"
#include "tests/unit/kernels/option_cases.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::cuda_shards_test {
namespace {

using collectives::testing::Rank;
using collectives::testing::RunRanks;
using testing::CountDevices;
using testing::CudaOptions;
using testing::CudaOutcome;
using testing::Describe;
using testing::kDivergences;
using testing::kIgnoreIndex;
using testing::Problem;
using testing::RandomProblem;
using testing::RandomTeacher;
using testing::Reference;
using testing::RelativeError;
using testing::RunCudaStep;
using testing::SameBits;
using testing::SetLogit;
using testing::Shape;
using testing::SoftProblem;
using testing::UseWithSoftTargets;

constexpr int kRanks = 2;

template <class Value>
std::vector<Value> RowsOf(const std::vector<Value>& all, const Shard& shard, int64_t columns) {
  if (all.empty()) return {};
  return {all.begin() + shard.first() * columns, all.begin() + shard.end() * columns};
}

// NaN where the expected value is, and close elsewhere.
void ExpectClose(const std::vector<float>& actual, const std::vector<float>& expected, double tolerance,
                 const char* what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  std::vector<float> numbers = actual;
  std::vector<double> wanted;
  int64_t differences = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool nan = std::isnan(expected[i]);
    if (nan != std::isnan(actual[i])) ++differences;
    if (nan) numbers[i] = 0;
    wanted.push_back(nan ? 0.0 : expected[i]);
  }
  EXPECT_EQ(differences, 0) << what << ": not the same rows overflowed";
  EXPECT_LT(RelativeError(numbers, wanted), tolerance) << what;
}

// One rank, connected.
class Session {
 public:
  explicit Session(Rank& rank) : rank_(rank) {
    const collectives::Result connected = collectives::ConnectNccl(
        {.rank = rank.rank, .size = rank.size, .device = rank.rank, .most_blocks = 2}, rank.rendezvous,
        &communicator_);
    EXPECT_TRUE(connected.ok()) << connected.message();
  }

  Shard ShardOf(const ShardLayout& layout) {
    Shard shard = layout.ShardOf(rank_.rank, Segments::kOfRanks, communicator_.get());
    shard.answering_rank = answering_rank_;
    return shard;
  }
  void SetAnsweringRank(int rank) { answering_rank_ = rank; }

  CudaOutcome Run(const Problem& problem, CudaOptions options = {}) {
    const ShardLayout layout(problem.shape.vocab, rank_.size);
    const Shard shard = ShardOf(layout);
    options.shard = &shard;
    options.initial_dw = RowsOf(options.initial_dw, shard, problem.shape.hidden);
    CudaOutcome outcome = RunCudaStep(testing::ShardOf(problem, shard), options);
    EXPECT_EQ(outcome.error, "");
    EXPECT_EQ(outcome.touched, "") << "its guard area was written to";
    return outcome;
  }

  // The same on this rank's GPU alone.
  static CudaOutcome RunWhole(const Problem& problem, const CudaOptions& options = {}) {
    CudaOutcome outcome = RunCudaStep(problem, options);
    EXPECT_EQ(outcome.error, "");
    return outcome;
  }

  // What this rank has of the batch, against that of one GPU.
  void ExpectLike(const CudaOutcome& whole, const CudaOutcome& own, const Problem& problem) {
    const ShardLayout layout(problem.shape.vocab, rank_.size);
    const Shard shard = ShardOf(layout);
    const double tolerance =
        testing::kFloat32Error + (problem.weight_type == DataType::kBFloat16 ? 4e-3 : 1e-3);
    if (shard.answers()) {
      const double of_losses = problem.teacher.has_value() ? 4e-5 : 2e-5;
      ExpectClose(own.losses, whole.losses, of_losses, "losses");
      ExpectClose(own.divergences, whole.divergences, of_losses, "divergences");
      ExpectClose(own.log_sum_exps, whole.log_sum_exps, 2e-5, "log-sum-exps");
      ExpectClose(own.z_losses, whole.z_losses, 2e-5, "z-losses");
      ExpectClose(own.log_probabilities, whole.log_probabilities, 2e-5, "log-probabilities");
      ExpectClose(own.dx, whole.dx, tolerance, "dX");
    }
    ExpectSameReturns(whole, own, shard.answers());
    ExpectClose(own.dw, RowsOf(whole.dw, shard, problem.shape.hidden), tolerance, "dW");
    ExpectClose(own.db, RowsOf(whole.db, shard, 1), 3 * tolerance, "db");
  }
  // Logits have the same bits, so tokens and ranks are the same ones. `whole` may have none of them.
  static void ExpectSameReturns(const CudaOutcome& whole, const CudaOutcome& own, bool answers) {
    if (whole.entropies.empty()) return;
    if (answers) {
      ExpectClose(own.entropies, whole.entropies, 1e-5, "entropies");
      ExpectClose(own.top_log_probabilities, whole.top_log_probabilities, 2e-5, "top log-probabilities");
      EXPECT_EQ(own.predictions, whole.predictions);
      EXPECT_EQ(own.ranks, whole.ranks);
      EXPECT_EQ(own.top_tokens, whole.top_tokens);
      return;
    }
    EXPECT_EQ(own.entropies, std::vector<float>(own.entropies.size(), 0.0f));
    EXPECT_EQ(own.top_log_probabilities, std::vector<float>(own.top_log_probabilities.size(), 0.0f));
    for (const std::vector<int32_t>* tokens : {&own.predictions, &own.ranks, &own.top_tokens}) {
      EXPECT_EQ(*tokens, std::vector<int32_t>(tokens->size(), -1));
    }
  }
  void ExpectLikeOneGpu(const Problem& problem, const CudaOptions& options = {}) {
    const CudaOutcome own = Run(problem, options);
    ExpectLike(RunWhole(problem, options), own, problem);
  }
  void ExpectLikeCpu(const Problem& problem, const CudaOptions& options = {}) {
    const CudaOutcome own = Run(problem, options);
    const Reference reference = testing::CpuResultsInFloat32(problem);
    const auto narrow = [](const std::vector<double>& wide) {
      return std::vector<float>(wide.begin(), wide.end());
    };
    CudaOutcome expected;
    expected.losses = narrow(reference.losses);
    expected.log_sum_exps = narrow(reference.log_sum_exp);
    expected.z_losses = narrow(reference.z_loss);
    expected.log_probabilities = narrow(reference.log_probability);
    if (problem.teacher.has_value()) expected.divergences = narrow(reference.divergence);
    expected.dx = narrow(reference.dx);
    expected.dw = narrow(reference.dw);
    if (!problem.bias.empty()) expected.db = narrow(reference.db);
    ExpectLike(expected, own, problem);
  }

  const Rank& rank() const { return rank_; }
  collectives::Communicator* communicator() { return communicator_.get(); }

 private:
  Rank& rank_;
  int answering_rank_ = 0;
  std::unique_ptr<collectives::Communicator> communicator_;
};

class CudaShards : public ::testing::TestWithParam<DataType> {
 protected:
  void SetUp() override {
    static const int devices = CountDevices();
    if (devices < kRanks) GTEST_SKIP() << kRanks << " ranks need as many GPUs, and here are " << devices;
  }
  static DataType type() { return GetParam(); }
  static void OnRanks(const std::function<void(Session&)>& body) {
    RunRanks(kRanks, [&](Rank& rank) {
      Session session(rank);
      if (!::testing::Test::HasFailure()) body(session);
    });
  }
  static Problem Random(const Shape& shape, double deviation = 2.0) {
    return RandomProblem({.shape = shape, .type = type(), .logit_deviation = deviation});
  }
};

TEST_P(CudaShards, ShapesAgreeWithTheCpu) {
  OnRanks([](Session& session) {
    for (const Shape& shape :
         {Shape{1, 2, 1}, Shape{2, 3, 5}, Shape{7, 257, 33}, Shape{129, 300, 40}, Shape{300, 96, 300},
          Shape{425, 777, 123}, Shape{513, 2000, 520}, Shape{1030, 4099, 264}, Shape{9, 50257, 123}}) {
      SCOPED_TRACE(Describe(shape));
      session.ExpectLikeCpu(Random(shape));
    }
  });
}

TEST_P(CudaShards, TilesAddUpWhoeverAnswers) {
  OnRanks([](Session& session) {
    for (const int answering : {0, 1}) {
      session.SetAnsweringRank(answering);
      CudaOptions options;
      for (const int64_t tile_rows : {33, 64, 300}) {
        options.tile_rows = tile_rows;
        options.shared = tile_rows != 64;
        session.ExpectLikeCpu(Random({300, 500, 72}), options);
      }
      options.weight_gradient = WeightGradient::kAccumulate;
      options.initial_dw.assign(500 * 72, 0.25f);
      session.ExpectLikeOneGpu(Random({300, 500, 72}), options);
      for (const DataType dx_type : {DataType::kBFloat16, DataType::kFloat16}) {
        options.dx_type = dx_type;
        session.ExpectLikeOneGpu(Random({300, 500, 71}), options);
      }
    }
  });
}

TEST_P(CudaShards, LabelsMayAllBeInOneShardAndRowsIgnored) {
  OnRanks([](Session& session) {
    for (const int64_t last : {0, 1}) {
      Problem problem = Random({200, 600, 64});
      for (size_t i = 0; i < 200; ++i) {
        problem.labels[i] = i % 3 == 0 ? kIgnoreIndex : last * 599 + (last == 0 ? 1 : -1) * int64_t(i % 7);
      }
      session.ExpectLikeCpu(problem, {.tile_rows = 70});
    }
    Problem problem = Random({20, 600, 64});
    problem.labels.assign(20, kIgnoreIndex);
    for (const bool shared : {false, true}) {
      EXPECT_EQ(session.Run(problem, {.shared = shared}).losses, std::vector<float>(20, 0.0f));
    }
  });
}

TEST_P(CudaShards, OptionsAgreeWithTheCpu) {
  OnRanks([](Session& session) {
    for (const testing::OptionCase& options : testing::OptionPaths()) {
      SCOPED_TRACE(options.name);
      Problem problem = Random({150, 700, 72});
      options.set(problem);
      session.ExpectLikeCpu(problem, {.tile_rows = 64});
    }
  });
}

TEST_P(CudaShards, ShardsMayLieFarApart) {
  OnRanks([](Session& session) {
    // Logits of one shard are far above those of the other, wherever the label is: hardly, much and beyond
    // what doubles have between them.
    for (const float distance : {5.0f, 60.0f, 300.0f, 3000.0f}) {
      SCOPED_TRACE(distance);
      Problem problem = Random({90, 500, 64});
      problem.bias.assign(500, 0.0f);
      for (size_t v = 0; v < 250; ++v) problem.bias[v] = distance;
      session.ExpectLikeOneGpu(problem);
    }
  });
}

TEST_P(CudaShards, RowsOutOfRangeInOneShardAreDoneAgain) {
  OnRanks([](Session& session) {
    Problem problem = Random({90, 5000, 64}, 1.0);
    // Not one of a sample of either shard.
    SetLogit(problem, 3, 13, 150.0f);
    SetLogit(problem, 40, 4987, 120.0f);
    SetLogit(problem, 60, 31, 90.0f);
    problem.labels[60] = 31;
    const CudaOutcome own = session.Run(problem);
    const CudaOutcome whole = Session::RunWhole(problem);
    session.ExpectLike(whole, own, problem);
    // An estimate is made for bf16 alone.
    const bool estimated = type() == DataType::kBFloat16;
    EXPECT_EQ(own.rows_redone, estimated ? 1 : 0);
  });
}

TEST_P(CudaShards, RowsThatOverflowAreNoOthersConcern) {
  OnRanks([](Session& session) {
    Problem problem = Random({90, 500, 64});
    auto x = problem.HiddenStates();
    x[5 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
    x[66 * 64 + 1] = std::numeric_limits<float>::infinity();
    problem.hidden_type = DataType::kFloat32;
    problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
    session.ExpectLikeOneGpu(problem, {.tile_rows = 40});
  });
}

// The magnitudes of one shard's weights alone make a row overflow: the other rank must hear of it.
TEST_P(CudaShards, RowsThatOverflowInOneShardDoSoInAll) {
  if (type() != DataType::kBFloat16) GTEST_SKIP() << "fp16 does not reach so far";
  OnRanks([](Session& session) {
    Problem problem = Random({20, 500, 64});
    std::vector<float> weight = problem.Weight();
    weight[499 * 64] = 1e30f;
    problem.weight = testing::Narrowed(type(), weight);
    auto x = problem.HiddenStates();
    x[7 * 64] = 1e30f;
    problem.hidden_states = testing::Narrowed(type(), x);
    const CudaOutcome own = session.Run(problem);
    if (session.rank().rank == 0) {
      EXPECT_TRUE(std::isnan(own.losses[7]));
    }
    session.ExpectLike(Session::RunWhole(problem), own, problem);
  });
}

TEST_P(CudaShards, NoDigitDependsOnExponentsOrOnWhatMovesParts) {
  OnRanks([](Session& session) {
    const Problem problem = Random({150, 700, 72});
    const CudaOutcome plain = session.Run(problem, {.tile_rows = 64});
    const CudaOutcome again = session.Run(problem, {.tile_rows = 64});
    const CudaOutcome moved = session.Run(problem, {.tile_rows = 64, .exponent_bias = -20});
    const CudaOutcome copied = session.Run(problem, {.tile_rows = 64, .shared = true});
    for (const CudaOutcome* other : {&again, &moved, &copied}) {
      EXPECT_TRUE(SameBits(plain.losses, other->losses));
      EXPECT_TRUE(SameBits(plain.dx, other->dx));
      EXPECT_TRUE(SameBits(plain.dw, other->dw));
    }
  });
}

TEST_P(CudaShards, LossesAloneAndGradientsOfWeightsAlone) {
  OnRanks([](Session& session) {
    const Problem problem = Random({150, 700, 72});
    const CudaOutcome all = session.Run(problem, {.tile_rows = 64});
    CudaOptions options{.tile_rows = 64, .dx_wanted = false};
    const CudaOutcome weights = session.Run(problem, options);
    EXPECT_TRUE(SameBits(all.losses, weights.losses));
    EXPECT_TRUE(SameBits(all.dw, weights.dw));
    options.weight_gradient = WeightGradient::kNone;
    options.initial_dw.assign(700 * 72, 7.0f);
    const CudaOutcome losses = session.Run(problem, options);
    EXPECT_TRUE(SameBits(all.losses, losses.losses));
    EXPECT_EQ(losses.dw, std::vector<float>(losses.dw.size(), 7.0f));
  });
}

// What different ranks send overtakes each other, but nobody's rows those of another.
TEST_P(CudaShards, RowsComeFromWhicheverRankHasThem) {
  OnRanks([](Session& session) {
    constexpr int64_t kBytes = int64_t{3} << 20;
    constexpr int kPlaces = 3;
    cuda::SharedRows rows;
    ASSERT_TRUE(rows.Create(session.communicator()).ok());
    std::array<cuda::DeviceBuffer, kPlaces> places;
    for (cuda::DeviceBuffer& place : places) {
      ASSERT_TRUE(cuda::DeviceBuffer::Create(kBytes, &place).ok());
      ASSERT_TRUE(rows.Add(place.data(), place.bytes(), nullptr).ok());
    }
    cuda::Stream stream;
    ASSERT_TRUE(cuda::Stream::Create(&stream).ok());
    std::vector<unsigned char> came(kBytes);
    for (int i = 0; i < 8 * kPlaces; i += kPlaces) {
      ASSERT_TRUE(session.communicator()->Barrier(nullptr).ok());
      for (int place = 0; place < kPlaces; ++place) {
        const int source = (i / kPlaces + place) % 3 % kRanks;
        void* const at = places[static_cast<size_t>(place)].data();
        if (session.rank().rank == source) {
          ASSERT_EQ(cudaMemsetAsync(at, i + place + 1, kBytes, stream.get()), cudaSuccess);
        }
        ASSERT_TRUE(rows.Share(source, at, kBytes, stream.get()).ok());
      }
      ASSERT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
      for (int place = 0; place < kPlaces; ++place) {
        const void* const at = places[static_cast<size_t>(place)].data();
        ASSERT_EQ(cudaMemcpy(came.data(), at, came.size(), cudaMemcpyDeviceToHost), cudaSuccess);
        const auto expected = static_cast<unsigned char>(i + place + 1);
        EXPECT_EQ(std::count(came.begin(), came.end(), expected), kBytes) << i << ", place " << place;
      }
    }
    ASSERT_TRUE(session.communicator()->Barrier(nullptr).ok());
    rows = {};  // before any rank frees what others have of it
    ASSERT_TRUE(session.communicator()->Barrier(nullptr).ok());
  });
}

// W and X in {-1, 0, 1}: logits are small integers, full of ties.
Problem Coarse(Problem problem) {
  const auto coarse = [&](const std::vector<float>& values, float scale) {
    std::vector<float> integers;
    for (const float value : values) integers.push_back(std::clamp(std::round(value * scale), -1.0f, 1.0f));
    return testing::Narrowed(problem.weight_type, integers);
  };
  problem.weight = coarse(problem.Weight(), std::sqrt(static_cast<float>(problem.shape.hidden)));
  problem.hidden_states = coarse(problem.HiddenStates(), 1.0f);
  return problem;
}

TEST_P(CudaShards, WholeRowsAreToldAsByOneGpu) {
  OnRanks([](Session& session) {
    struct Case {
      Shape shape;
      int64_t tile_rows;
      int32_t top_k;
    };
    // Shards with fewer entries than tokens are asked for; tiles that are not whole, of one row, and of more
    // rows than are told of at once.
    for (const Case& told :
         {Case{{1, 2, 1}, 0, 2}, Case{{2, 3, 5}, 1, 3}, Case{{3, 64, 8}, 0, 64}, Case{{5, 90, 24}, 2, 64},
          Case{{7, 257, 33}, 0, 1}, Case{{300, 500, 72}, 33, 5}, Case{{300, 500, 72}, 64, 0},
          Case{{1030, 4099, 264}, 512, 64}, Case{{9, 50257, 123}, 0, 17}, Case{{2300, 300, 40}, 2300, 3}}) {
      for (const int answering : {0, 1}) {
        SCOPED_TRACE(Describe(told.shape) + ", " + std::to_string(told.top_k));
        session.SetAnsweringRank(answering);
        session.ExpectLikeOneGpu(
            Random(told.shape),
            {.tile_rows = told.tile_rows, .whole_rows = true, .top_k = told.top_k, .shared = answering == 1});
      }
    }
  });
}

TEST_P(CudaShards, TiesOfWholeRowsGoToTheLowestTokenWhereverItIs) {
  OnRanks([](Session& session) {
    for (const Shape& shape : {Shape{80, 300, 3}, Shape{80, 301, 6}, Shape{80, 90, 1}}) {
      SCOPED_TRACE(Describe(shape));
      session.ExpectLikeOneGpu(Coarse(Random(shape)), {.tile_rows = 33, .whole_rows = true, .top_k = 40});
    }
    // All logits are the same: tokens come in their order, and no label has any above it.
    Problem problem = Random({20, 300, 8});
    problem.weight.assign(problem.weight.size(), 0);
    const CudaOutcome own = session.Run(problem, {.whole_rows = true, .top_k = 64});
    if (session.rank().rank != 0) return;
    EXPECT_EQ(own.predictions, std::vector<int32_t>(20, 0));
    EXPECT_EQ(own.ranks, std::vector<int32_t>(20, 0));
    for (int32_t i = 0; i < 20 * 64; ++i) EXPECT_EQ(own.top_tokens[static_cast<size_t>(i)], i % 64);
    for (const float entropy : own.entropies) EXPECT_NEAR(entropy, std::log(300.0), 1e-5);
  });
}

// The label in either shard, the best tokens in either.
TEST_P(CudaShards, WholeRowsCrossShards) {
  OnRanks([](Session& session) {
    Problem problem = Random({64, 600, 64});
    for (int64_t row = 0; row < 64; ++row) {
      problem.labels[static_cast<size_t>(row)] = row % 7 == 6   ? kIgnoreIndex
                                                 : row % 2 == 0 ? 10 + row
                                                                : 590 - row;
      SetLogit(problem, row, row % 4 < 2 ? 100 + row : 400 + row, 12.0f);
    }
    for (const bool ranked : {true, false}) {
      const CudaOptions options{
          .tile_rows = 40, .whole_rows = true, .top_k = 6, .ranks_wanted = ranked, .shared = !ranked};
      session.ExpectLikeOneGpu(problem, options);
    }
  });
}

TEST_P(CudaShards, WholeRowsGoWithEveryOption) {
  OnRanks([](Session& session) {
    for (const testing::OptionCase& options : testing::OptionPaths()) {
      SCOPED_TRACE(options.name);
      Problem problem = Random({150, 700, 72});
      options.set(problem);
      problem.entropy_gradients.clear();  // one GPU makes them of rounded exponentials
      session.ExpectLikeOneGpu(problem, {.tile_rows = 64, .whole_rows = true, .top_k = 9});
    }
  });
}

TEST_P(CudaShards, AskingForWholeRowsChangesNoBit) {
  OnRanks([](Session& session) {
    const Problem problem = Random({150, 700, 72});
    const CudaOutcome plain = session.Run(problem, {.tile_rows = 64});
    CudaOptions options{.tile_rows = 64, .whole_rows = true, .top_k = 8};
    const CudaOutcome told = session.Run(problem, options);
    EXPECT_TRUE(SameBits(plain.losses, told.losses));
    EXPECT_TRUE(SameBits(plain.dx, told.dx));
    EXPECT_TRUE(SameBits(plain.dw, told.dw));
    options.dx_wanted = false;
    options.weight_gradient = WeightGradient::kNone;
    const CudaOutcome losses = session.Run(problem, options);
    EXPECT_TRUE(SameBits(plain.losses, losses.losses));
    EXPECT_TRUE(SameBits(told.entropies, losses.entropies));
    EXPECT_TRUE(SameBits(told.top_log_probabilities, losses.top_log_probabilities));
    EXPECT_EQ(told.top_tokens, losses.top_tokens);
    EXPECT_EQ(told.ranks, losses.ranks);
  });
}

TEST_P(CudaShards, WholeRowsThatAreDoneAgainOrOverflowAreToldAsByOneGpu) {
  OnRanks([](Session& session) {
    const CudaOptions options{.tile_rows = 40, .whole_rows = true, .top_k = 3};
    Problem redone = Random({90, 5000, 64}, 1.0);
    SetLogit(redone, 3, 13, 150.0f);
    SetLogit(redone, 60, 4987, 90.0f);
    redone.labels[60] = 4987;
    session.ExpectLikeOneGpu(redone, options);
    Problem overflown = Random({90, 500, 64});
    auto x = overflown.HiddenStates();
    x[5 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
    x[66 * 64 + 1] = std::numeric_limits<float>::infinity();
    overflown.hidden_type = DataType::kFloat32;
    overflown.hidden_states = testing::Narrowed(DataType::kFloat32, x);
    session.ExpectLikeOneGpu(overflown, options);
    if (type() != DataType::kBFloat16) return;
    // One shard alone makes the row overflow.
    Problem in_one = Random({20, 500, 64});
    std::vector<float> weight = in_one.Weight();
    weight[499 * 64] = 1e30f;
    in_one.weight = testing::Narrowed(type(), weight);
    x = in_one.HiddenStates();
    x[7 * 64] = 1e30f;
    in_one.hidden_states = testing::Narrowed(type(), x);
    session.ExpectLikeOneGpu(in_one, options);
    const CudaOutcome own = session.Run(in_one, options);
    if (session.rank().rank != 0) return;
    EXPECT_EQ(own.predictions[7], -1);
    EXPECT_TRUE(std::isnan(own.entropies[7]));
  });
}

TEST_P(CudaShards, SoftTargetsAgreeWithTheCpu) {
  OnRanks([](Session& session) {
    for (const Divergence divergence : kDivergences) {
      // Shards of one entry; more rows than logits are held of at once; more entries than a block takes.
      for (const Shape& shape : {Shape{1, 2, 1}, Shape{2, 3, 5}, Shape{7, 257, 33}, Shape{129, 300, 40},
                                 Shape{1100, 2099, 72}, Shape{40, 50257, 24}}) {
        SCOPED_TRACE(Describe(shape) + ", divergence " + std::to_string(static_cast<int>(divergence)));
        const Problem problem = SoftProblem(shape, type(), divergence);
        // So few numbers may all be roundings.
        shape.tokens < 3 ? session.ExpectLikeOneGpu(problem) : session.ExpectLikeCpu(problem);
      }
    }
  });
}

TEST_P(CudaShards, SoftTargetsGoWithEveryOption) {
  OnRanks([](Session& session) {
    for (const Divergence divergence : kDivergences) {
      for (const int options : testing::SoftOptionPairs()) {
        SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + ", options " + std::to_string(options));
        Problem problem = SoftProblem({37, 530, 24}, type(), divergence);
        problem.labels[5] = kIgnoreIndex;
        if (options % 3 != 0) problem.bias = testing::Spread(530, -1.0f, 1.0f);
        if (options % 3 != 1) problem.teacher->bias = testing::Spread(530, 1.0f, -1.0f);
        UseWithSoftTargets(problem, options);
        session.ExpectLikeOneGpu(problem, {.whole_rows = options % 2 == 1, .top_k = options % 7});
      }
    }
  });
}

TEST_P(CudaShards, TilesOfSoftTargetsAddUpWhoeverAnswers) {
  OnRanks([](Session& session) {
    for (const Divergence divergence : kDivergences) {
      for (const int answering : {0, 1}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + ", answers " + std::to_string(answering));
        session.SetAnsweringRank(answering);
        Problem problem = SoftProblem({100, 500, 72}, type(), divergence);
        UseWithSoftTargets(problem, testing::kAllSoftOptions);
        for (size_t i = 0; i < 100; i += 9) problem.labels[i] = kIgnoreIndex;
        CudaOptions options{.tile_rows = 33, .shared = answering == 0};
        session.ExpectLikeCpu(problem, options);
        options.weight_gradient = WeightGradient::kAccumulate;
        options.initial_dw.assign(500 * 72, 0.25f);
        options.tile_rows = 64;
        options.dx_type = DataType::kBFloat16;
        session.ExpectLikeOneGpu(problem, options);
      }
    }
    // More tiles than one, each with more rows than logits are held of at once.
    Problem large = SoftProblem({2300, 400, 40}, type(), Divergence::kJensenShannon);
    session.ExpectLikeOneGpu(large, {.tile_rows = 1100, .whole_rows = true, .top_k = 3});
  });
}

TEST_P(CudaShards, TeachersMayHaveAnyTypeAndPath) {
  OnRanks([](Session& session) {
    for (const DataType teacher_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      for (const cuda::Path path : {cuda::Path::kPortable, cuda::Path::kHopper}) {
        if (!testing::CanRun(path, teacher_type)) continue;
        SCOPED_TRACE(std::string(Name(teacher_type)) +
                     (path == cuda::Path::kHopper ? " Hopper" : " portable"));
        Problem problem = Random({70, 600, 40});
        problem.teacher = RandomTeacher(
            problem.shape, {.hidden = 56, .type = teacher_type, .distillation = {.label_weight = 0.5f}});
        CudaOptions options{.tile_rows = 40};
        options.teacher_path = path;
        session.ExpectLikeCpu(problem, options);
      }
    }
  });
}

TEST_P(CudaShards, LabelsOfSoftTargetsMayAllBeInOneShardAndRowsIgnored) {
  OnRanks([](Session& session) {
    for (const Divergence divergence : kDivergences) {
      for (const int64_t last : {0, 1}) {
        Problem problem = SoftProblem({90, 600, 64}, type(), divergence);
        problem.teacher->distillation.label_weight = 1.0f;
        for (size_t i = 0; i < 90; ++i) {
          problem.labels[i] = i % 3 == 0 ? kIgnoreIndex : last * 599 + (last == 0 ? 1 : -1) * int64_t(i % 7);
        }
        session.ExpectLikeCpu(problem, {.tile_rows = 35});
      }
      Problem problem = SoftProblem({20, 600, 64}, type(), divergence);
      problem.labels.assign(20, kIgnoreIndex);
      EXPECT_EQ(session.Run(problem).losses, std::vector<float>(20, 0.0f));
    }
  });
}

// What one shard is certain of has next to no probability in the other head, wherever the label is.
TEST_P(CudaShards, ShardsOfSoftTargetsMayLieFarApart) {
  OnRanks([](Session& session) {
    for (const Divergence divergence : kDivergences) {
      for (const float distance : {5.0f, 60.0f, 300.0f}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + ", " + std::to_string(distance));
        Problem problem = SoftProblem({50, 500, 64}, type(), divergence);
        // Between heads that agree on nothing the divergence of Jensen and Shannon is flat: what is left of
        // its gradient are roundings.
        problem.teacher->distillation.label_weight = 1.0f;
        problem.bias.assign(500, 0.0f);
        problem.teacher->bias.assign(500, 0.0f);
        for (size_t v = 0; v < 250; ++v) {
          problem.bias[v] = distance;
          problem.teacher->bias[499 - v] = distance;
        }
        session.ExpectLikeOneGpu(problem);
        problem.teacher->bias.clear();
        session.ExpectLikeOneGpu(problem);
      }
    }
  });
}

TEST_P(CudaShards, TeacherThatIsTheHeadItselfGivesExactlyNothing) {
  OnRanks([](Session& session) {
    for (const Divergence divergence : kDivergences) {
      for (const float temperature : {1.0f, 3.0f}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + ", " + std::to_string(temperature));
        Problem problem = Random({90, 600, 40}, 3.0);
        problem.teacher = testing::Itself(problem, {.divergence = divergence, .temperature = temperature});
        const CudaOutcome outcome = session.Run(problem, {.tile_rows = 64});
        for (const std::vector<float>* values :
             {&outcome.divergences, &outcome.losses, &outcome.dx, &outcome.dw}) {
          EXPECT_TRUE(std::all_of(values->begin(), values->end(), [](float value) { return value == 0; }));
        }
      }
    }
  });
}

TEST_P(CudaShards, LossesOfSoftTargetsAloneAndWholeRowsAreTheSame) {
  OnRanks([](Session& session) {
    for (const Divergence divergence : kDivergences) {
      const Problem problem = SoftProblem({60, 700, 40}, type(), divergence);
      const CudaOutcome all = session.Run(problem, {.tile_rows = 33});
      CudaOptions options{.tile_rows = 33, .dx_wanted = false};
      const CudaOutcome weights = session.Run(problem, options);
      EXPECT_TRUE(SameBits(all.dw, weights.dw));
      options.weight_gradient = WeightGradient::kNone;
      const CudaOutcome losses = session.Run(problem, options);
      EXPECT_TRUE(SameBits(all.losses, losses.losses));
      EXPECT_TRUE(SameBits(all.divergences, losses.divergences));
      const CudaOutcome told =
          session.Run(problem, {.tile_rows = 33, .whole_rows = true, .top_k = 64, .shared = true});
      EXPECT_TRUE(SameBits(all.losses, told.losses));
      EXPECT_TRUE(SameBits(all.dx, told.dx));
      EXPECT_TRUE(SameBits(all.dw, told.dw));
    }
  });
}

// Rows of the student or of the teacher, on all ranks or by the weights of one shard alone.
TEST_P(CudaShards, RowsOfSoftTargetsThatOverflowAreNoOthersConcern) {
  OnRanks([](Session& session) {
    for (const Divergence divergence : kDivergences) {
      SCOPED_TRACE(static_cast<int>(divergence));
      Problem problem = Random({60, 500, 64});
      problem.teacher = RandomTeacher(
          problem.shape, {.hidden = 40, .type = type(), .distillation = {.divergence = divergence}});
      auto x = problem.HiddenStates();
      x[5 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
      problem.hidden_type = DataType::kFloat32;
      problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
      const auto set = [&](std::vector<unsigned char>& values, size_t place, float value) {
        const std::vector<unsigned char> narrow = testing::Narrowed(type(), {value});
        std::copy(narrow.begin(), narrow.end(), values.begin() + static_cast<int64_t>(place * narrow.size()));
      };
      for (size_t row = 0; row < 60; ++row) set(problem.teacher->hidden_states, row * 40, 0.0f);
      set(problem.teacher->hidden_states, 9 * 40, std::numeric_limits<float>::infinity());
      if (type() == DataType::kBFloat16) {
        set(problem.teacher->weight, 499 * 40, 1e30f);
        set(problem.teacher->hidden_states, 17 * 40, 1e30f);
      }
      const CudaOptions options{.tile_rows = 40, .whole_rows = true, .top_k = 2};
      const CudaOutcome own = session.Run(problem, options);
      session.ExpectLike(Session::RunWhole(problem, options), own, problem);
      if (session.rank().rank != 0) continue;
      EXPECT_TRUE(std::isnan(own.losses[5]));
      EXPECT_TRUE(std::isnan(own.divergences[9]));
      EXPECT_EQ(std::isnan(own.losses[17]), type() == DataType::kBFloat16);
      EXPECT_EQ(own.predictions[9], -1);
    }
  });
}

TEST_P(CudaShards, HugeScalesOfSoftTargetsNeverMakeDwNaN) {
  OnRanks([](Session& session) {
    for (const Divergence divergence : kDivergences) {
      for (const float temperature : {1.0f, 1e-30f, 1e30f}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(divergence)) + ", " + std::to_string(temperature));
        Problem problem = SoftProblem({60, 900, 40}, type(), divergence);
        problem.gradient_scale = 3e38f;
        problem.teacher->distillation.temperature = temperature;
        const CudaOutcome outcome = session.Run(problem);
        EXPECT_TRUE(std::all_of(outcome.dw.begin(), outcome.dw.end(),
                                [](float value) { return std::isfinite(value); }));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Types, CudaShards, ::testing::Values(DataType::kBFloat16, DataType::kFloat16),
                         [](const auto& test) { return std::string(Name(test.param)); });

}  // namespace
}  // namespace lossd::kernels::cuda_shards_test
