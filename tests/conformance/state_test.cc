// What a head keeps between batches: weights and the gradient's window.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing::state_test {
namespace {

using kernels::SizeOf;
using kernels::testing::RandomProblem;
using kernels::testing::SameBits;

constexpr int64_t kVocab = 321;
constexpr int64_t kHidden = 43;

std::vector<float> Zeros(int64_t rows) { return std::vector<float>(static_cast<size_t>(rows * kHidden)); }

class State : public HeadTest {
 protected:
  Problem MakeProblem(uint64_t seed, int64_t tokens = 60) const {
    return RandomProblem(
        {.shape = {tokens, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0, .seed = seed});
  }
};

INSTANTIATE_TEST_SUITE_P(All, State, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

constexpr std::pair<int64_t, int64_t> kRanges[] = {{0, kVocab}, {0, 1}, {kVocab - 1, 1}, {17, 200}};

TEST_P(State, WeightsComeBackBitForBitAndConverted) {
  const Problem problem = MakeProblem(1);
  HeadUnderTest head(device_.get(), problem);
  const int64_t row_bytes = kHidden * SizeOf(type());
  for (const auto& range : kRanges) {
    const int64_t first = range.first;
    const int64_t rows = range.second;
    SCOPED_TRACE("rows " + std::to_string(first) + " + " + std::to_string(rows));
    const std::vector<unsigned char> expected(problem.weight.begin() + first * row_bytes,
                                              problem.weight.begin() + (first + rows) * row_bytes);
    EXPECT_TRUE(head.Weights(type(), first, rows) == expected);
    for (const DataType to : kTypes) {
      std::vector<unsigned char> converted(static_cast<size_t>(rows * kHidden * SizeOf(to)));
      kernels::Convert(type(), expected.data(), to, converted.data(), rows * kHidden);
      EXPECT_TRUE(head.Weights(to, first, rows) == converted) << Name(to);
    }
  }
}

TEST_P(State, BatchesSeeTheWeightsThatWerePublishedBeforeThem) {
  const Problem before = MakeProblem(1, 300);
  Problem after = MakeProblem(2, 300);
  after.hidden_states = before.hidden_states;
  after.labels = before.labels;
  HeadUnderTest head(device_.get(), before);
  const ChunkOutput expected_before = head.Run(before);
  head.Publish(after.weight);
  const ChunkOutput expected_after = head.Run(before);
  EXPECT_FALSE(SameBits(expected_before.losses, expected_after.losses));
  // The first is perhaps still under way when the next weights come.
  for (int i = 0; i < 3; ++i) {
    head.Publish(before.weight);
    const std::unique_ptr<BatchUnderWay> first = head.Start(KindOf(before), {RowsOf(before, 0, 300)});
    head.Publish(after.weight);
    const std::unique_ptr<BatchUnderWay> second = head.Start(KindOf(before), {RowsOf(before, 0, 300)});
    EXPECT_TRUE(head.Weights(type(), 0, kVocab) == after.weight);
    const ChunkOutput first_output = first->Await().front();
    const ChunkOutput second_output = second->Await().front();
    EXPECT_TRUE(SameBits(first_output.losses, expected_before.losses));
    EXPECT_TRUE(SameBits(first_output.dx, expected_before.dx));
    EXPECT_TRUE(SameBits(second_output.losses, expected_after.losses));
    EXPECT_TRUE(SameBits(second_output.dx, expected_after.dx));
  }
}

std::vector<float> Ramp(float step) {
  std::vector<float> values(kVocab);
  for (size_t v = 0; v < values.size(); ++v) values[v] = step * static_cast<float>(v % 7);
  return values;
}

// Weights and bias are one version.
TEST_P(State, BatchesSeeTheBiasThatWasPublishedWithTheirWeights) {
  Problem before = MakeProblem(1, 300);
  before.bias = Ramp(0.5f);
  before.options.label_smoothing = 0.1f;
  Problem after = before;
  after.bias = Ramp(-0.25f);
  HeadUnderTest head(device_.get(), before);
  const ChunkOutput expected_before = head.Run(before);
  head.Publish(after.weight, after.bias);
  const ChunkOutput expected_after = head.Run(after);
  EXPECT_FALSE(SameBits(expected_before.losses, expected_after.losses));
  head.Publish(before.weight, before.bias);
  const std::unique_ptr<BatchUnderWay> first = head.Start(KindOf(before), {RowsOf(before, 0, 300)});
  head.Publish(after.weight, after.bias);
  const std::unique_ptr<BatchUnderWay> second = head.Start(KindOf(before), {RowsOf(before, 0, 300)});
  for (const auto& [from, rows] : kRanges) {
    EXPECT_TRUE(
        SameBits(head.Bias(from, rows), {after.bias.begin() + from, after.bias.begin() + from + rows}));
  }
  EXPECT_TRUE(SameBits(first->Await().front().losses, expected_before.losses));
  EXPECT_TRUE(SameBits(second->Await().front().losses, expected_after.losses));
}

TEST_P(State, TheGradientOfTheBiasIsReadInRowsAndZeroAfterAReset) {
  Problem problem = MakeProblem(1);
  problem.bias = Ramp(0.5f);
  HeadUnderTest head(device_.get(), problem);
  EXPECT_TRUE(SameBits(head.BiasGradient(), std::vector<float>(kVocab)));
  head.Run(problem);
  const std::vector<float> whole = head.BiasGradient();
  for (const auto& [first, rows] : kRanges) {
    EXPECT_TRUE(
        SameBits(head.BiasGradient(first, rows), {whole.begin() + first, whole.begin() + first + rows}));
  }
  head.backend().ResetGradient();
  EXPECT_TRUE(SameBits(head.BiasGradient(), std::vector<float>(kVocab)));
  head.Run(problem);
  EXPECT_TRUE(SameBits(head.BiasGradient(), whole));
}

TEST_P(State, TheGradientIsZeroBeforeTheFirstContribution) {
  Problem problem = MakeProblem(1);
  HeadUnderTest head(device_.get(), problem);
  EXPECT_TRUE(SameBits(head.Gradient(), Zeros(kVocab)));
  problem.labels.assign(60, kIgnoreIndex);  // rows that add nothing are no contribution
  head.Run(problem);
  EXPECT_TRUE(SameBits(head.Gradient(), Zeros(kVocab)));
}

TEST_P(State, RowsOfTheGradientAreThoseOfTheWhole) {
  const Problem problem = MakeProblem(1);
  HeadUnderTest head(device_.get(), problem);
  head.Run(problem);
  const std::vector<float> whole = head.Gradient();
  for (const auto& range : kRanges) {
    const std::vector<float> rows = head.Gradient(range.first, range.second);
    EXPECT_TRUE(SameBits(rows.data(), &whole[range.first * kHidden], range.second * kHidden));
  }
}

TEST_P(State, AReadSeesEveryBatchThatWasStarted) {
  const Problem problem = MakeProblem(1, 400);
  HeadUnderTest head(device_.get(), problem);
  head.Run(problem);
  const std::vector<float> expected = head.Gradient();
  head.backend().ResetGradient();
  const std::unique_ptr<BatchUnderWay> batch = head.Start(KindOf(problem), {RowsOf(problem, 0, 400)});
  EXPECT_TRUE(SameBits(head.Gradient(), expected));
  batch->Await();
}

TEST_P(State, AResetWindowHoldsNothingOfTheLast) {
  const Problem first = MakeProblem(1);
  Problem second = MakeProblem(2);
  second.weight = first.weight;
  HeadUnderTest fresh(device_.get(), second);
  fresh.Run(second);
  const std::vector<float> expected = fresh.Gradient();
  HeadUnderTest head(device_.get(), first);
  for (int i = 0; i < 2; ++i) {
    head.Run(first);
    head.backend().ResetGradient();
    EXPECT_TRUE(SameBits(head.Gradient(), Zeros(kVocab)));
    head.Run(second);
    EXPECT_TRUE(SameBits(head.Gradient(), expected));
  }
}

TEST_P(State, IgnoredRowsDoNotBeginAWindow) {
  const Problem problem = MakeProblem(1);
  HeadUnderTest head(device_.get(), problem);
  head.Run(problem);
  const std::vector<float> expected = head.Gradient();
  Problem ignored = problem;
  ignored.labels.assign(60, kIgnoreIndex);
  const ChunkOutput output = head.Run(ignored);
  EXPECT_TRUE(SameBits(output.losses, std::vector<float>(60, 0.0f)));
  EXPECT_TRUE(SameBits(output.dx, Zeros(60)));
  EXPECT_TRUE(SameBits(head.Gradient(), expected));
  head.backend().ResetGradient();
  // In a batch with rows that count, too, and before them.
  head.Run(KindOf(problem), {RowsOf(ignored, 0, 60), RowsOf(problem, 0, 60)});
  EXPECT_TRUE(SameBits(head.Gradient(), expected));
}

}  // namespace
}  // namespace lossd::engine::testing::state_test
