// What is peculiar to heads that lie on several ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/shard.h"
#include "server/engine/common/errors.h"
#include "tests/conformance/head_under_test.h"
#include "tests/conformance/rank_threads.h"

namespace lossd::engine::testing::ranks_test {
namespace {

using kernels::ShardLayout;
using kernels::testing::RandomProblem;
using kernels::testing::RandomTeacher;
using kernels::testing::SameBits;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kLargeMemory = int64_t{1} << 40;

using Holder = std::function<int32_t(uint64_t batch)>;

std::unique_ptr<Device> Ranks(int32_t ranks, Holder holder = nullptr) {
  return *CreateRankThreads(
      {.ranks = ranks, .workspace_bytes = kWorkspaceBytes, .holder = std::move(holder)});
}

// The ranks in turn, from this one on.
Holder InTurn(int32_t ranks, int32_t first = 0) {
  return [ranks, first](uint64_t batch) {
    return static_cast<int32_t>((static_cast<uint64_t>(first) + batch) % static_cast<uint64_t>(ranks));
  };
}

// A little that one rank has, and the others have more of.
std::unique_ptr<Device> RanksWithLittleAt(int32_t poor_rank, int64_t bytes) {
  return *CreateRankThreads(
      {.ranks = 3, .workspace_bytes = kWorkspaceBytes, .memory_limit = [poor_rank, bytes](int32_t rank) {
         return kWorkspaceBytes + (rank == poor_rank ? bytes : kLargeMemory);
       }});
}

TEST(RanksTest, EveryRankHasRowsOfTheSmallestVocabularyAndBordersAreThoseOfSegments) {
  for (const int64_t vocab : {8, 9, 13, 1003, 4096, 50257, 131072}) {
    const ShardLayout whole(vocab, 1);
    const kernels::Shard segments = whole.ShardOf(0, kernels::Segments::kFixed, nullptr);
    for (int32_t ranks = 1; ranks <= kernels::kMostRanks; ++ranks) {
      const ShardLayout layout(vocab, ranks);
      EXPECT_EQ(layout.first(0), 0);
      EXPECT_EQ(layout.first(ranks), vocab);
      for (int32_t rank = 0; rank < ranks; ++rank) {
        EXPECT_GT(layout.rows(rank), 0) << vocab << " over " << ranks;
        EXPECT_THAT(segments.borders, ::testing::Contains(layout.first(rank)));
      }
    }
  }
  for (int32_t ranks = 1; ranks <= kernels::kMostRanks; ++ranks) {
    for (int32_t rank = 0; rank < ranks; ++rank) EXPECT_EQ(ShardLayout(ranks, ranks).rows(rank), 1);
  }
}

TEST(RanksTest, AVocabularyWithFewerEntriesThanRanksIsRefused) {
  const std::unique_ptr<Device> device = Ranks(3);
  const absl::Status planned = device->PlanMemory({"h", 2, 4, DataType::kFloat32}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(planned)) << planned;
  EXPECT_EQ(FieldOf(planned), "vocab_size");
  EXPECT_THAT(std::string(planned.message()), AllOf(HasSubstr("vocab_size is 2"), HasSubstr("3 devices")));
  EXPECT_TRUE(absl::IsInvalidArgument(device->CreateHead({"h", 2, 4, DataType::kFloat32}).status()));
  EXPECT_TRUE(device->CreateHead({"h", 3, 4, DataType::kFloat32}).ok());
}

TEST(RanksTest, AHeadThatOneRankHasNoMemoryForIsOnNone) {
  const HeadConfig large{"large", 30000, 8, DataType::kFloat32};
  const HeadConfig small{"small", 3000, 8, DataType::kFloat32};
  const std::unique_ptr<Device> device = RanksWithLittleAt(2, int64_t{1} << 20);
  for (int i = 0; i < 20; ++i) {
    const absl::Status refused = device->CreateHead(large).status();
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("rank 2"));
  }
  // Nothing of the refused ones is left at any rank.
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(device->CreateHead(small).ok());
}

TEST(RanksTest, AGradientThatOneRankHasNoMemoryForIsOnNone) {
  const HeadConfig config{"h", 30000, 8, DataType::kFloat32};
  // Weights, one gradient and the room of what goes between ranks are 0.96 MiB at each rank.
  const std::unique_ptr<Device> device = RanksWithLittleAt(1, 1200 << 10);
  const std::unique_ptr<HeadBackend> head = *device->CreateHead(config);
  for (int i = 0; i < 5; ++i) {
    const absl::Status refused = device->CreateGradient(config).status();
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("rank 1"));
  }
}

TEST(RanksTest, ASecondGradientIsCountedOnce) {
  const HeadConfig config{.name = "h",
                          .vocab_size = 30000,
                          .hidden_size = 8,
                          .weight_type = DataType::kFloat32,
                          .double_buffer = true};
  // Weights, two gradients, and the room of what goes between ranks, which is all of a part so small.
  const int64_t part = ShardLayout(config.vocab_size, 3).rows(1) * config.hidden_size * 4;
  const std::unique_ptr<Device> device = RanksWithLittleAt(1, 4 * part);
  const std::unique_ptr<HeadBackend> head = *device->CreateHead(config);
  EXPECT_TRUE(device->CreateGradient(config).ok());
}

TEST(RanksTest, HeadsAreCreatedAndDeletedWhileOthersCompute) {
  const std::unique_ptr<Device> device = Ranks(3);
  const Problem problem = RandomProblem({.shape = {16, 101, 8}, .type = DataType::kFloat32, .seed = 3});
  HeadUnderTest head(device.get(), problem);
  std::mutex mutex;
  std::deque<std::unique_ptr<HeadBackend>> heads;  // deleted by the device's owner
  std::deque<std::unique_ptr<Gradient>> gradients;
  std::atomic<bool> over = false;
  std::thread creating([&] {
    for (int i = 0; i < 50; ++i) {
      const HeadConfig config{absl::StrCat("h", i), 1000, 16, DataType::kFloat32};
      absl::StatusOr<std::unique_ptr<HeadBackend>> created = device->CreateHead(config);
      absl::StatusOr<std::unique_ptr<Gradient>> gradient = device->CreateGradient(config);
      EXPECT_TRUE(created.ok() && gradient.ok());
      const std::lock_guard lock(mutex);
      heads.push_back(*std::move(created));
      gradients.push_back(*std::move(gradient));
    }
    over = true;
  });
  const ChunkOutput first = head.Run(problem);
  for (bool last = false; !last;) {
    last = over;
    EXPECT_TRUE(SameBits(head.Run(problem).losses, first.losses));
    const std::lock_guard lock(mutex);
    gradients.clear();
    heads.clear();
  }
  creating.join();
}

TEST(RanksTest, AMemoryPlanIsOfAPart) {
  const HeadConfig config{"h", 4096, 64, DataType::kBFloat16};
  const MemoryPlan whole = *Ranks(1)->PlanMemory(config);
  const MemoryPlan quarter = *Ranks(4)->PlanMemory(config);
  const auto bytes = [](const MemoryPlan& plan, absl::string_view purpose) {
    int64_t sum = 0;
    for (const MemoryItem& item : plan) sum += item.purpose == purpose ? item.bytes : 0;
    return sum;
  };
  for (const char* purpose : {"weights", "gradient"}) {
    EXPECT_GT(bytes(whole, purpose), 0);
    EXPECT_EQ(4 * bytes(quarter, purpose), bytes(whole, purpose)) << purpose;
  }
}

// Everything that a batch gives and leaves, for comparisons of bits.
struct Bits {
  ChunkOutput output;
  std::vector<float> dw;
  std::vector<float> db;
  std::vector<GradientStats> stats;    // summaries, and what a step tells
  std::vector<unsigned char> weights;  // after it

  bool operator==(const Bits& other) const {
    return SameBits(output.losses, other.output.losses) && SameBits(output.dx, other.output.dx) &&
           testing::SameBits(output.returns, other.output.returns) && SameBits(dw, other.dw) &&
           SameBits(db, other.db) && std::equal(stats.begin(), stats.end(), other.stats.begin(), SameStats) &&
           weights == other.weights;
  }
  static bool SameStats(const GradientStats& a, const GradientStats& b) {
    return std::bit_cast<uint64_t>(a.norm) == std::bit_cast<uint64_t>(b.norm) &&
           std::bit_cast<uint64_t>(a.bias_norm) == std::bit_cast<uint64_t>(b.bias_norm) &&
           a.largest == b.largest && a.non_finite == b.non_finite;
  }
};

Bits BitsOf(const std::unique_ptr<Device>& device, kernels::Segments segments, const Problem& problem) {
  HeadConfig config = ConfigOf(problem);
  config.optimizer.kind = OptimizerKind::kAdamW;
  HeadUnderTest head(device.get(), config);
  head.Publish(problem.weight, problem.bias);
  std::unique_ptr<HeadUnderTest> teacher;
  BatchKey kind = KindOf(problem);
  kind.segments = segments;
  kind.returns = {true, true, true, true, true, true, problem.teacher.has_value(), 5};
  if (problem.teacher.has_value()) {
    teacher = std::make_unique<HeadUnderTest>(device.get(), TeacherConfigOf(problem));
    teacher->Publish(problem.teacher->weight);
    kind.teacher = teacher->AsTeacher(problem, head);
  }
  const int64_t half = problem.shape.tokens / 2;
  (void)head.Run(kind, {RowsOf(problem, 0, half)});
  Bits bits;
  bits.output = head.Run(kind, {RowsOf(problem, half, problem.shape.tokens - half)}).front();
  bits.dw = head.Gradient();
  bits.db = head.BiasGradient();
  for (const double scale : {1.0, 0.3, -1.7, 1e-3, 0.9, 11.0}) {
    bits.stats.push_back(head.Stats(nullptr, scale));
  }
  const absl::StatusOr<GradientTallies> stepped = head.backend().ApplyStep(
      nullptr, {.learning_rate = 1e-2, .gradient_scale = 0.3, .optimizer = config.optimizer});
  EXPECT_TRUE(stepped.ok()) << stepped.status();
  bits.stats.push_back(StatsOf(stepped.value_or(GradientTallies{})));
  bits.weights = head.Weights(problem.weight_type, 0, config.vocab_size);
  return bits;
}

Bits FixedBits(int32_t ranks, const Problem& problem) {
  return BitsOf(Ranks(ranks), kernels::Segments::kFixed, problem);
}

struct Case {
  const char* name;
  DataType type = DataType::kFloat32;
  void (*change)(Problem& problem) = nullptr;
};

class FixedSegments : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    All, FixedSegments,
    ::testing::Values(Case{"plain_float32"}, Case{"plain_bfloat16", DataType::kBFloat16},
                      Case{"plain_float16", DataType::kFloat16},
                      Case{"smoothed", DataType::kFloat32,
                           [](Problem& problem) {
                             problem.options = {.label_smoothing = 0.1f, .lse_square_scale = 1e-3f};
                             problem.class_weights.assign(static_cast<size_t>(problem.shape.vocab), 0.75f);
                           }},
                      Case{"capped_with_bias", DataType::kBFloat16,
                           [](Problem& problem) {
                             problem.options = {.logit_scale = 0.5f, .softcap = 20.0f};
                             problem.bias.assign(static_cast<size_t>(problem.shape.vocab), 0.25f);
                           }},
                      Case{"far_apart", DataType::kFloat32,
                           [](Problem& problem) {
                             // Rows that are computed again in one segment alone, and one that overflows
                             // there.
                             kernels::testing::SetLogit(problem, 30, 900, 4000.0f);
                             kernels::testing::SetLogit(problem, 31, 3, -3000.0f);
                           }},
                      Case{"taught", DataType::kFloat32,
                           [](Problem& problem) {
                             problem.teacher = RandomTeacher(
                                 problem.shape, {.hidden = 24,
                                                 .distillation = {kernels::Divergence::kJensenShannon, 0.25f,
                                                                  2.0f, 1.0f, 0.5f}});
                           }}),
    [](const auto& test) { return test.param.name; });

Problem ProblemOf(const Case& which) {
  Problem problem =
      RandomProblem({.shape = {61, 1003, 48}, .type = which.type, .logit_deviation = 3.0, .seed = 5});
  problem.labels[7] = kIgnoreIndex;
  if (which.change != nullptr) which.change(problem);
  return problem;
}

TEST_P(FixedSegments, GiveTheSameBitsOnAnyNumberOfRanks) {
  const Problem problem = ProblemOf(GetParam());
  const Bits one = FixedBits(1, problem);
  for (int32_t ranks = 2; ranks <= kernels::kMostRanks; ++ranks) {
    EXPECT_TRUE(FixedBits(ranks, problem) == one) << ranks << " ranks";
  }
}

TEST_P(FixedSegments, AndThoseOfRanksGiveTheSameBitsWhoeverHoldsTheRows) {
  const Problem problem = ProblemOf(GetParam());
  for (const kernels::Segments segments : {kernels::Segments::kOfRanks, kernels::Segments::kFixed}) {
    const Bits at_leader = BitsOf(Ranks(3), segments, problem);
    for (const int32_t first : {1, 2}) {
      EXPECT_TRUE(BitsOf(Ranks(3, InTurn(3, first)), segments, problem) == at_leader)
          << "from rank " << first << " on";
    }
  }
}

TEST(RanksTest, BatchesOfSeveralHoldersAreUnderWayTogether) {
  const Problem problem = RandomProblem({.shape = {72, 501, 16}, .type = DataType::kFloat32, .seed = 9});
  const auto run = [&problem](const std::unique_ptr<Device>& device, std::vector<float>* losses) {
    HeadUnderTest head(device.get(), problem);
    std::deque<std::unique_ptr<BatchUnderWay>> under_way;
    for (int64_t first = 0; first < 72; first += 8) {
      // Two chunks each.
      under_way.push_back(
          head.Start(KindOf(problem), {RowsOf(problem, first, 5), RowsOf(problem, first + 5, 3)}));
    }
    for (const auto& batch : under_way) {
      for (const ChunkOutput& output : batch->Await()) {
        losses->insert(losses->end(), output.losses.begin(), output.losses.end());
        losses->insert(losses->end(), output.dx.begin(), output.dx.end());
      }
    }
    return head.Gradient();
  };
  std::vector<float> at_leader;
  std::vector<float> in_turn;
  const std::vector<float> dw = run(Ranks(4), &at_leader);
  EXPECT_TRUE(SameBits(run(Ranks(4, InTurn(4)), &in_turn), dw));
  EXPECT_TRUE(SameBits(in_turn, at_leader));
}

TEST(RanksTest, StateOfOneNumberOfRanksGoesIntoAnother) {
  const HeadConfig config{.name = "h",
                          .vocab_size = 101,
                          .hidden_size = 7,
                          .weight_type = DataType::kBFloat16,
                          .bias = true,
                          .optimizer = {.kind = OptimizerKind::kAdamW},
                          .master_weights = true};
  const auto size = [&](const StateTensor& tensor) {
    return static_cast<size_t>(tensor.rows * tensor.columns * kernels::SizeOf(tensor.type));
  };
  const std::unique_ptr<Device> three = Ranks(3);
  const std::unique_ptr<Device> four = Ranks(4);
  HeadUnderTest from(three.get(), config);
  HeadUnderTest to(four.get(), config);
  std::vector<std::vector<unsigned char>> written;
  for (const StateTensor& tensor : from.backend().StateTensors()) {
    std::vector<unsigned char> bytes(size(tensor));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>((i * 37 + 11) % 63);
    ASSERT_TRUE(from.backend().WriteState(tensor.name, 0, tensor.rows, bytes.data()).ok());
    written.push_back(std::move(bytes));
  }
  ASSERT_TRUE(from.backend().RestoreState().ok());
  size_t number = 0;
  for (const StateTensor& tensor : from.backend().StateTensors()) {
    std::vector<unsigned char> bytes(size(tensor));
    ASSERT_TRUE(from.backend().ReadState(tensor.name, 0, tensor.rows, bytes.data()).ok());
    EXPECT_EQ(bytes, written[number++]) << tensor.name;
    // In pieces that end within shards.
    for (int64_t row = 0; row < tensor.rows; row += 40) {
      const int64_t rows = std::min<int64_t>(40, tensor.rows - row);
      const auto* piece = bytes.data() + static_cast<size_t>(row) * size(tensor) / tensor.rows;
      ASSERT_TRUE(to.backend().WriteState(tensor.name, row, rows, piece).ok());
    }
  }
  ASSERT_TRUE(to.backend().RestoreState().ok());
  EXPECT_EQ(to.Weights(DataType::kFloat32, 0, 101), from.Weights(DataType::kFloat32, 0, 101));
  EXPECT_EQ(to.Weights(DataType::kBFloat16, 0, 101), from.Weights(DataType::kBFloat16, 0, 101));
  EXPECT_TRUE(SameBits(to.Bias(0, 101), from.Bias(0, 101)));
}

TEST(RanksTest, RowsThatGoInSeveralPiecesArriveWhereTheyBelong) {
  // 15 MiB of fp32, whose borders of pieces are none of shards.
  const HeadConfig config{.name = "h",
                          .vocab_size = 30011,
                          .hidden_size = 131,
                          .weight_type = DataType::kBFloat16,
                          .bias = true,
                          .optimizer = {.kind = OptimizerKind::kSgd},
                          .master_weights = true};
  std::vector<float> rows(static_cast<size_t>(config.elements()));
  std::vector<float> bias(static_cast<size_t>(config.vocab_size));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 255);  // bf16 has them all
  std::iota(bias.begin(), bias.end(), 0.5f);
  const std::unique_ptr<Device> device = Ranks(3);
  const std::unique_ptr<HeadBackend> head = *device->CreateHead(config);

  ASSERT_EQ(head->WriteGradient(nullptr, 0, config.vocab_size, rows.data(), bias.data()), absl::OkStatus());
  std::vector<float> read(rows.size());
  std::vector<float> read_bias(bias.size());
  ASSERT_EQ(head->ReadGradient(nullptr, 0, config.vocab_size, read.data()), absl::OkStatus());
  ASSERT_EQ(head->ReadBiasGradient(nullptr, 0, config.vocab_size, read_bias.data()), absl::OkStatus());
  EXPECT_TRUE(SameBits(read, rows));
  EXPECT_TRUE(SameBits(read_bias, bias));

  WeightBuffers staged{*HostBuffer::Create(config.staged_bytes(), Commit::kNow),
                       *HostBuffer::Create(config.bias_bytes(), Commit::kNow)};
  std::memcpy(staged.weights.data(), rows.data(), rows.size() * sizeof(float));
  std::memcpy(staged.bias.data(), bias.data(), bias.size() * sizeof(float));
  ASSERT_EQ(head->PublishWeights(std::move(staged)), absl::OkStatus());
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    std::vector<char> weights(rows.size() * static_cast<size_t>(kernels::SizeOf(type)));
    ASSERT_EQ(head->ReadWeightRows(0, config.vocab_size, type, weights.data()), absl::OkStatus());
    kernels::Convert(type, weights.data(), DataType::kFloat32, read.data(), config.elements());
    EXPECT_TRUE(SameBits(read, rows));
  }
  ASSERT_EQ(head->ReadBias(0, config.vocab_size, read_bias.data()), absl::OkStatus());
  EXPECT_TRUE(SameBits(read_bias, bias));
}

TEST(RanksTest, UnknownStateIsRefusedAndTheGroupGoesOn) {
  const std::unique_ptr<Device> device = Ranks(2);
  HeadUnderTest head(device.get(), 10, 4, DataType::kFloat32);
  std::vector<float> values(40);
  EXPECT_TRUE(absl::IsInvalidArgument(head.backend().ReadState("nothing", 0, 10, values.data())));
  EXPECT_TRUE(absl::IsInvalidArgument(head.backend().WriteState("nothing", 0, 10, values.data())));
  EXPECT_TRUE(absl::IsFailedPrecondition(head.backend().ApplyStep(nullptr, {}).status()));
  EXPECT_TRUE(head.backend().ReadState("weight", 0, 10, values.data()).ok());
}

}  // namespace
}  // namespace lossd::engine::testing::ranks_test
