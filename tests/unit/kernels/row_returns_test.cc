// What is told of each row beyond its loss, against the reference's logits and by hand.
#include <gtest/gtest.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/row_order.h"
#include "kernels/cpu/tile_memory.h"
#include "kernels/linear_cross_entropy.h"
#include "tests/unit/kernels/problem.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::row_returns_test {
namespace {

using cpu::Arithmetic;
using testing::Describe;
using testing::GuardedBytes;
using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::RunReference;
using testing::RunStep;
using testing::SameBits;
using testing::SetLogit;
using testing::Shape;
using testing::StepResult;

constexpr int64_t kIgnored = -100;
constexpr Arithmetic kArithmetics[] = {Arithmetic::kSimd, Arithmetic::kLibraryFloat32};

// W, X in {-1, 0, 1}: logits are small integers, exact in any arithmetic, and full of ties.
Problem ProblemOfIntegers(const Shape& shape) {
  Problem problem = RandomProblem({.shape = shape});
  const auto coarse = [](std::vector<float> values, float scale) {
    for (float& value : values) value = std::clamp(std::round(value * scale), -1.0f, 1.0f);
    return testing::Narrowed(DataType::kFloat32, values);
  };
  problem.weight = coarse(problem.Weight(), std::sqrt(static_cast<float>(shape.hidden)));
  problem.hidden_states = coarse(problem.HiddenStates(), 1.0f);
  return problem;
}

// Tokens by logit, the lower one first where they are equal.
std::vector<int32_t> Ordered(const double* logits, int64_t vocab) {
  std::vector<int32_t> tokens(static_cast<size_t>(vocab));
  std::iota(tokens.begin(), tokens.end(), 0);
  std::stable_sort(tokens.begin(), tokens.end(),
                   [logits](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  return tokens;
}

void ExpectOrder(const Problem& problem, const StepResult& result, int32_t top_k) {
  const Reference reference = RunReference(problem);
  const int64_t vocab = problem.shape.vocab;
  for (int64_t r = 0; r < problem.shape.tokens; ++r) {
    const double* logits = &reference.logits[r * vocab];
    const std::vector<int32_t> ordered = Ordered(logits, vocab);
    EXPECT_EQ(result.prediction[r], ordered[0]) << r;
    const double of_label = logits[problem.labels[r]];
    const auto above = std::count_if(logits, logits + vocab, [=](double s) { return s > of_label; });
    EXPECT_EQ(result.target_rank[r], above) << r;
    for (int32_t i = 0; i < top_k; ++i) {
      ASSERT_EQ(result.top_tokens[r * top_k + i], ordered[i]) << r << " " << i;
      EXPECT_NEAR(result.top_log_probabilities[r * top_k + i], logits[ordered[i]] - reference.log_sum_exp[r],
                  1e-5);
    }
  }
}

TEST(RowReturns, OrderAndTiesAreExact) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const Shape& shape : {Shape{1, 1, 1}, Shape{5, 3, 4}, Shape{25, 257, 20}, Shape{30, 3000, 40}}) {
      const auto most = static_cast<int32_t>(std::min<int64_t>(shape.vocab, kMostTopK));
      for (const int32_t top_k : {0, 1, std::min(5, most), most}) {
        SCOPED_TRACE(Describe(shape) + " " + std::to_string(top_k));
        Problem problem = ProblemOfIntegers(shape);
        problem.options.softcap = 8.0f;  // keeps the order and the ties
        const StepResult result = RunStep(problem, {.arithmetic = arithmetic, .top_k = top_k});
        ASSERT_EQ(result.status, Status::kOk);
        EXPECT_TRUE(result.intact);
        ExpectOrder(problem, result, top_k);
      }
    }
  }
}

TEST(RowReturns, NumbersAgreeWithTheReference) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const double deviation : {0.01, 2.0, 10.0}) {
      for (const float softcap : {0.0f, 5.0f}) {
        SCOPED_TRACE(std::to_string(deviation) + " " + std::to_string(softcap));
        Problem problem = RandomProblem({.shape = {40, 1000, 50}, .logit_deviation = deviation});
        problem.options = {
            .logit_scale = 1.5f, .softcap = softcap, .label_smoothing = 0.1f, .lse_square_scale = 0.01f};
        problem.token_weights.assign(40, 0.5f);
        const Reference reference = RunReference(problem);
        const StepResult result = RunStep(problem, {.arithmetic = arithmetic, .top_k = 4});
        EXPECT_TRUE(result.intact);
        EXPECT_LT(RelativeError(result.log_sum_exp, reference.log_sum_exp), 1e-6);
        EXPECT_LT(RelativeError(result.z_loss, reference.z_loss), 2e-6);
        EXPECT_LT(RelativeError(result.log_probability, reference.log_probability), 2e-6);
        EXPECT_LT(RelativeError(result.entropy, reference.entropy), 3e-6);
        for (int64_t r = 0; r < 40; ++r) {
          const double* logits = &reference.logits[r * 1000];
          const double largest = *std::max_element(logits, logits + 1000);
          EXPECT_NEAR(logits[result.prediction[r]], largest, 1e-4);
          EXPECT_EQ(result.top_tokens[r * 4], result.prediction[r]);
          EXPECT_EQ(result.target_rank[r] == 0, result.prediction[r] == problem.labels[r]);
        }
      }
    }
  }
}

// One token nearly certain: entropy and −log p are near zero, and keep their digits.
TEST(RowReturns, NearCertaintyKeepsItsDigits) {
  Problem problem = RandomProblem({.shape = {6, 700, 40}, .logit_deviation = 0.5});
  for (int64_t r = 0; r < 6; ++r) SetLogit(problem, r, problem.labels[r], 30.0f);
  const Reference reference = RunReference(problem);
  const StepResult result = RunStep(problem, {.top_k = 2});
  for (int64_t r = 0; r < 6; ++r) {
    EXPECT_LT(result.entropy[r], 1e-7f);
    EXPECT_NEAR(result.entropy[r] / reference.entropy[r], 1.0, 3e-5) << r;
    EXPECT_NEAR(result.log_probability[r] / reference.log_probability[r], 1.0, 3e-5) << r;
    EXPECT_EQ(result.top_tokens[2 * r], problem.labels[r]);
    EXPECT_EQ(result.top_log_probabilities[2 * r], result.log_probability[r]);
  }
}

TEST(RowReturns, RowsThatAreRedoneTellTheSame) {
  for (const Arithmetic arithmetic : kArithmetics) {
    Problem problem = ProblemOfIntegers({60, 900, 40});
    SetLogit(problem, 3, 800, 200.0f);
    SetLogit(problem, 4, 800, 200.0f);
    problem.labels[4] = 800;
    problem.labels[5] = 800;
    const Reference reference = RunReference(problem);
    const StepResult result = RunStep(problem, {.arithmetic = arithmetic, .top_k = 7});
    EXPECT_EQ(result.stats.rows_redone, 2);
    ExpectOrder(problem, result, 7);
    EXPECT_LT(RelativeError(result.entropy, reference.entropy), 1e-5);
    EXPECT_LT(RelativeError(result.log_probability, reference.log_probability), 1e-5);
  }
}

// Threads bring a row's blocks in any order.
TEST(RowReturns, TheOrderOfBlocksDoesNotMatter) {
  constexpr int64_t kVocab = 4 * cpu::kBlock;
  const int64_t entries[] = {kVocab};
  const auto lay_out = [&](cpu::TileMemory& memory, void* base) {
    return cpu::LayOut({.rows = 1, .hidden = 1}, entries, {}, base, &memory);
  };
  cpu::TileMemory memory;
  const cpu::Workspace& tile = memory.segments[0];
  GuardedBytes workspace(lay_out(memory, nullptr), 64);
  std::vector<float> logits(kVocab);
  // The list ends among equal ones.
  for (int64_t v = 0; v < kVocab; ++v) logits[v] = static_cast<float>(v % 5);
  const std::vector<double> exact(logits.begin(), logits.end());
  const std::vector<int32_t> ordered = Ordered(exact.data(), kVocab);
  RowReturns returns;
  std::vector<int32_t> ranks(1);
  returns.target_rank = ranks.data();
  returns.top_k = 17;
  std::vector<int64_t> blocks = {0, 1, 2, 3};
  do {
    lay_out(memory, workspace.data());
    tile.row_states[0] = {.label = 700};
    tile.row_details[0] = {.label_logit = logits[700]};
    const cpu::RowOrder order(returns, tile);
    for (const int64_t block : blocks) {
      const float* values = &logits[block * cpu::kBlock];
      order.Add(0, block * cpu::kBlock, values, cpu::kBlock, *std::max_element(values, values + cpu::kBlock));
    }
    for (int32_t i = 0; i < 17; ++i) ASSERT_EQ(tile.top_tokens[i], ordered[i]) << i;
    EXPECT_EQ(tile.row_details[0].above,
              std::count_if(logits.begin(), logits.end(), [&](float s) { return s > logits[700]; }));
  } while (std::next_permutation(blocks.begin(), blocks.end()));
  EXPECT_TRUE(workspace.Intact());
}

struct Told {
  std::vector<float> numbers;
  std::vector<int32_t> tokens;

  bool operator==(const Told& other) const {
    return SameBits(numbers, other.numbers) && tokens == other.tokens;
  }
};

// All that is told of rows [first, first + count) of a result.
Told Of(const StepResult& result, int64_t first, int64_t count, int64_t top_k) {
  Told told;
  const auto take = [](const auto& from, int64_t begin, int64_t size, auto& to) {
    to.insert(to.end(), from.begin() + begin, from.begin() + begin + size);
  };
  for (const auto* numbers :
       {&result.losses, &result.log_sum_exp, &result.z_loss, &result.log_probability, &result.entropy}) {
    take(*numbers, first, count, told.numbers);
  }
  take(result.top_log_probabilities, first * top_k, count * top_k, told.numbers);
  take(result.prediction, first, count, told.tokens);
  take(result.target_rank, first, count, told.tokens);
  take(result.top_tokens, first * top_k, count * top_k, told.tokens);
  return told;
}

TEST(RowReturns, DoNotDependOnTheRowsBesideThemNorOnThreads) {
  Problem whole = RandomProblem({.shape = {150, 3000, 40}, .logit_deviation = 3.0});
  whole.options = {.softcap = 9.0f, .label_smoothing = 0.1f, .lse_square_scale = 0.01f};
  SetLogit(whole, 20, 2900, 200.0f);
  const StepResult expected = RunStep(whole, {.top_k = 20});
  for (const int64_t count : {1, 2, 13, 149}) {
    for (const int64_t first : {int64_t{0}, 150 - count}) {
      const StepResult result = RunStep(testing::PartOf(whole, first, count), {.top_k = 20});
      EXPECT_TRUE(Of(result, 0, count, 20) == Of(expected, first, count, 20)) << first << " " << count;
    }
  }
  const StepResult tiles = RunStep(whole, {.tile_rows = 40, .top_k = 20});
  EXPECT_TRUE(Of(tiles, 0, 150, 20) == Of(expected, 0, 150, 20));
#ifdef _OPENMP
  const int threads = omp_get_max_threads();
  for (const int count : {1, 3, 8}) {
    omp_set_num_threads(count);
    const StepResult result = RunStep(whole, {.top_k = 20});
    EXPECT_TRUE(Of(result, 0, 150, 20) == Of(expected, 0, 150, 20)) << count;
  }
  omp_set_num_threads(threads);
#endif
}

TEST(RowReturns, ChangeNoBitOfTheResults) {
  for (const Arithmetic arithmetic : kArithmetics) {
    const Problem problem = RandomProblem({.shape = {60, 900, 40}, .logit_deviation = 3.0});
    const StepResult plain = RunStep(problem, {.arithmetic = arithmetic});
    const StepResult told = RunStep(problem, {.arithmetic = arithmetic, .top_k = 5});
    EXPECT_TRUE(SameBits(told.losses, plain.losses));
    EXPECT_TRUE(SameBits(told.dx, plain.dx));
    EXPECT_TRUE(SameBits(told.dw, plain.dw));
  }
}

TEST(RowReturns, OfIgnoredRowsAreZerosAndOfOverflowedOnesNaN) {
  Problem problem = RandomProblem({.shape = {3, 300, 40}});
  problem.options.lse_square_scale = 0.01f;
  problem.labels[0] = kIgnored;
  std::vector<float> x = problem.HiddenStates();
  for (int64_t h = 0; h < 40; ++h) x[40 + h] = 3e38f;
  problem.hidden_states = testing::Narrowed(DataType::kFloat32, x);
  const StepResult result = RunStep(problem, {.top_k = 2});
  const Told ignored = Of(result, 0, 1, 2);
  const Told overflowed = Of(result, 1, 1, 2);
  for (const float number : ignored.numbers) EXPECT_EQ(number, 0.0f);
  for (const float number : overflowed.numbers) EXPECT_TRUE(std::isnan(number));
  for (const int32_t token : ignored.tokens) EXPECT_EQ(token, -1);
  for (const int32_t token : overflowed.tokens) EXPECT_EQ(token, -1);
  const Told valid = Of(result, 2, 1, 2);
  for (const float number : valid.numbers) EXPECT_TRUE(std::isfinite(number));
  for (const int32_t token : valid.tokens) EXPECT_GE(token, 0);
}

}  // namespace
}  // namespace lossd::kernels::row_returns_test
