// What a row is given does not depend on the company it comes in, and dW is the sum over all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing::batches_test {
namespace {

using kernels::testing::RandomProblem;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;

constexpr auto kRepeat = ChunkRows::Accumulate::kNo;

// What the order of fp32 sums may change.
constexpr double kOrderError = 1e-5;

double Difference(const std::vector<float>& actual, const std::vector<float>& expected) {
  return RelativeError(actual, {expected.begin(), expected.end()});
}

class Batches : public HeadTest {
 protected:
  static constexpr int64_t kTokens = 700;
  static constexpr int64_t kVocab = 1300;
  static constexpr int64_t kHidden = 136;

  Batches()
      : problem_(
            RandomProblem({.shape = {kTokens, kVocab, kHidden}, .type = type(), .logit_deviation = 3.0})) {}

  // That rows [first, first + count) of the problem came out as in `whole`.
  static void ExpectRows(const ChunkOutput& part, const ChunkOutput& whole, int64_t first, int64_t count) {
    EXPECT_TRUE(SameBits(part.losses.data(), &whole.losses[first], count));
    EXPECT_TRUE(SameBits(part.dx.data(), &whole.dx[first * kHidden], count * kHidden));
  }

  // The whole problem in one chunk, by a head of its own.
  void RunWhole() {
    HeadUnderTest head(device_.get(), problem_);
    whole_ = head.Run(problem_);
    gradient_ = head.Gradient();
  }

  const Problem problem_;
  ChunkOutput whole_;
  std::vector<float> gradient_;
};

INSTANTIATE_TEST_SUITE_P(All, Batches, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Batches, RowsHaveTheSameBitsAloneAndInAnyChunk) {
  RunWhole();
  HeadUnderTest head(device_.get(), problem_);
  for (const int64_t count : {1, 2, 3, 7, 8, 16, 31, 64, 65, 100, 128, 129, 255, 256, 257, 512, 699}) {
    for (const int64_t first : {int64_t{0}, (kTokens - count) / 2, kTokens - count}) {
      SCOPED_TRACE("rows " + std::to_string(first) + " + " + std::to_string(count));
      const ChunkInput chunk = RowsOf(problem_, first, count);
      ExpectRows(head.Run(KindOf(problem_), {chunk}).front(), whole_, first, count);
    }
  }
}

TEST_P(Batches, RowsHaveTheSameBitsWhenTheirChunksAreGathered) {
  RunWhole();
  HeadUnderTest head(device_.get(), problem_);
  for (const int64_t size : {1, 5, 64, 233}) {
    SCOPED_TRACE(size);
    std::vector<ChunkInput> chunks;
    for (int64_t first = 0; first < 3 * size && first < kTokens; first += size) {
      chunks.push_back(RowsOf(problem_, first, std::min(size, kTokens - first)));
    }
    // In company of other scales, and of rows that do not count.
    ChunkInput other = RowsOf(problem_, 300, 77);
    other.gradient_scale = 1000.0f;
    chunks.insert(chunks.begin() + 1, other);
    other.accumulate = kRepeat;
    chunks.push_back(other);
    std::vector<ChunkOutput> outputs = head.Run(KindOf(problem_), chunks);
    outputs.pop_back();
    outputs.erase(outputs.begin() + 1);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const int64_t first = static_cast<int64_t>(i) * size;
      ExpectRows(outputs[i], whole_, first, std::min(size, kTokens - first));
    }
  }
}

TEST_P(Batches, ChunksOfAnySizeAddUpToTheSameGradient) {
  RunWhole();
  for (const int64_t size : {7, 100, 350}) {
    SCOPED_TRACE(size);
    HeadUnderTest one_by_one(device_.get(), problem_);
    std::vector<ChunkInput> chunks;
    for (int64_t first = 0; first < kTokens; first += size) {
      chunks.push_back(RowsOf(problem_, first, std::min(size, kTokens - first)));
      one_by_one.Run(KindOf(problem_), {chunks.back()});
    }
    EXPECT_LT(Difference(one_by_one.Gradient(), gradient_), kOrderError);
    HeadUnderTest gathered(device_.get(), problem_);
    gathered.Run(KindOf(problem_), chunks);
    EXPECT_LT(Difference(gathered.Gradient(), gradient_), kOrderError);
  }
}

TEST_P(Batches, TheSameCallsGiveTheSameBits) {
  RunWhole();
  for (int i = 0; i < 3; ++i) {
    HeadUnderTest head(device_.get(), problem_);
    ExpectRows(head.Run(problem_), whole_, 0, kTokens);
    EXPECT_TRUE(SameBits(head.Gradient(), gradient_));
  }
}

// A client sends a chunk again whose answer it has lost.
TEST_P(Batches, RepeatsAreAnsweredAndLeaveEveryBitOfTheGradient) {
  RunWhole();
  HeadUnderTest head(device_.get(), problem_);
  ChunkInput repeat = RowsOf(problem_, 0, kTokens);
  repeat.accumulate = kRepeat;
  ExpectRows(head.Run(KindOf(problem_), {repeat}).front(), whole_, 0, kTokens);
  EXPECT_TRUE(SameBits(head.Gradient(), std::vector<float>(gradient_.size(), 0.0f)));
  head.Run(problem_);
  ExpectRows(head.Run(KindOf(problem_), {repeat, repeat}).back(), whole_, 0, kTokens);
  EXPECT_TRUE(SameBits(head.Gradient(), gradient_));
}

TEST_P(Batches, RepeatsBesideNewChunksAddNothing) {
  RunWhole();
  HeadUnderTest head(device_.get(), problem_);
  ChunkInput repeat = RowsOf(problem_, 100, 300);
  repeat.accumulate = kRepeat;
  head.Run(KindOf(problem_), {repeat, RowsOf(problem_, 0, 350), repeat, RowsOf(problem_, 350, 350)});
  EXPECT_LT(Difference(head.Gradient(), gradient_), kOrderError);
}

// As many as the device takes, of two heads.
TEST_P(Batches, UnderWayAtOnceDoNotMixUp) {
  RunWhole();
  HeadUnderTest head(device_.get(), problem_);
  const Problem other_problem =
      RandomProblem({.shape = {kTokens, kVocab, kHidden}, .type = type(), .logit_deviation = 1.0, .seed = 7});
  HeadUnderTest other(device_.get(), other_problem);
  const ChunkOutput other_whole = other.Run(other_problem);
  other.backend().ResetGradient();
  std::vector<std::unique_ptr<BatchUnderWay>> batches;
  std::vector<std::unique_ptr<BatchUnderWay>> other_batches;
  for (int64_t first = 0; first < kTokens; first += 100) {
    batches.push_back(head.Start(KindOf(problem_), {RowsOf(problem_, first, 100)}));
    other_batches.push_back(other.Start(KindOf(other_problem), {RowsOf(other_problem, first, 100)}));
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    const int64_t first = static_cast<int64_t>(i) * 100;
    ExpectRows(batches[i]->Await().front(), whole_, first, 100);
    ExpectRows(other_batches[i]->Await().front(), other_whole, first, 100);
  }
  EXPECT_LT(Difference(head.Gradient(), gradient_), kOrderError);
  EXPECT_EQ(device_->BatchesUnderWay(), 0);
}

// In about the least workspace that takes a head of these sizes a batch is worked on in many tiles.
TEST_P(Batches, SmallTilesGiveTheSameRowsAndSum) {
  RunWhole();
  constexpr int64_t kStep = 64 << 10;
  const HeadConfig config{"h", kVocab, kHidden, type()};
  int64_t too_small = 0;
  int64_t enough = kWorkspaceBytes;
  while (enough - too_small > kStep) {
    const int64_t middle = too_small + (enough - too_small) / 2 / 256 * 256;
    CreateDevice(GetParam().device, middle);
    (device_->PlanMemory(config).ok() ? enough : too_small) = middle;
  }
  CreateDevice(GetParam().device, enough);
  HeadUnderTest head(device_.get(), problem_);
  const ChunkOutput output = head.Run(problem_);
  if (GetParam().device.bits_depend_on_workspace(type())) {
    EXPECT_LT(Difference(output.losses, whole_.losses), kOrderError);
    EXPECT_LT(Difference(output.dx, whole_.dx), GradientError());
    EXPECT_LT(Difference(head.Gradient(), gradient_), GradientError());
  } else {
    ExpectRows(output, whole_, 0, kTokens);
    EXPECT_LT(Difference(head.Gradient(), gradient_), kOrderError);
  }
}

}  // namespace
}  // namespace lossd::engine::testing::batches_test
