// Logits against those of the oracle, and against each other: every type, option and cut into rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing::logits_test {
namespace {

using kernels::SizeOf;
using kernels::testing::Describe;
using kernels::testing::Narrowed;
using kernels::testing::RandomProblem;
using kernels::testing::Reference;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;
using kernels::testing::SetLogit;
using kernels::testing::Shape;

constexpr double kLogitError = 1e-5;

struct TopLogits {
  std::vector<int32_t> tokens;
  std::vector<float> logits;
  std::vector<float> log_sum_exp;
};

// Rows [first, first + rows) of a problem whose hidden states are of the head's type.
LogitRows RowsWanted(const Problem& problem, int64_t first, int64_t rows) {
  const int64_t row_bytes = problem.shape.hidden * SizeOf(problem.hidden_type);
  return {.rows = rows,
          .hidden_states = problem.hidden_states.data() + first * row_bytes,
          .logit_scale = problem.options.logit_scale,
          .softcap = problem.options.softcap,
          .bias = problem.bias.empty() ? Bias::kIgnore : Bias::kUse,
          .outputs = {}};
}

std::vector<unsigned char> LogitsAs(DataType to, HeadUnderTest& head, const Problem& problem, int64_t first,
                                    int64_t rows) {
  GuardedBytes values(rows * problem.shape.vocab * SizeOf(to), 64, SizeOf(to));
  LogitRows wanted = RowsWanted(problem, first, rows);
  wanted.outputs = {.type = to, .logits = values.data()};
  const absl::Status status = head.backend().Logits(wanted);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(values.Intact()) << "written beside the logits";
  const auto* bytes = values.As<unsigned char>();
  return {bytes, bytes + values.size()};
}

std::vector<float> LogitsOf(HeadUnderTest& head, const Problem& problem, int64_t first, int64_t rows) {
  const std::vector<unsigned char> bytes = LogitsAs(DataType::kFloat32, head, problem, first, rows);
  std::vector<float> logits(bytes.size() / sizeof(float));
  std::memcpy(logits.data(), bytes.data(), bytes.size());
  return logits;
}
std::vector<float> LogitsOf(HeadUnderTest& head, const Problem& problem) {
  return LogitsOf(head, problem, 0, problem.shape.tokens);
}

TopLogits TopOf(HeadUnderTest& head, const Problem& problem, int32_t top_k) {
  const int64_t rows = problem.shape.tokens;
  GuardedBytes tokens(rows * top_k * 4, 64, 4);
  GuardedBytes logits(rows * top_k * 4, 64, 4);
  GuardedBytes log_sum_exp(rows * 4, 64, 4);
  LogitRows wanted = RowsWanted(problem, 0, rows);
  wanted.outputs.top_k = top_k;
  wanted.outputs.top_tokens = tokens.As<int32_t>();
  wanted.outputs.top_logits = logits.As<float>();
  wanted.outputs.log_sum_exp = log_sum_exp.As<float>();
  const absl::Status status = head.backend().Logits(wanted);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(tokens.Intact() && logits.Intact() && log_sum_exp.Intact()) << "written beside the largest";
  const auto values = [](auto* begin, int64_t count) { return std::vector(begin, begin + count); };
  return {values(tokens.As<int32_t>(), rows * top_k), values(logits.As<float>(), rows * top_k),
          values(log_sum_exp.As<float>(), rows)};
}

// The largest of these logits, as they are to be told.
void ExpectLargest(const std::vector<float>& logits, int64_t vocab, int32_t top_k, const TopLogits& top) {
  for (size_t row = 0; row < top.log_sum_exp.size(); ++row) {
    const float* of_row = &logits[row * static_cast<size_t>(vocab)];
    std::vector<int32_t> order(static_cast<size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [=](int32_t a, int32_t b) { return of_row[a] > of_row[b]; });
    for (int32_t i = 0; i < top_k; ++i) {
      const size_t place = row * static_cast<size_t>(top_k) + static_cast<size_t>(i);
      ASSERT_EQ(top.tokens[place], order[static_cast<size_t>(i)]) << row << " " << i;
      ASSERT_EQ(top.logits[place], of_row[order[static_cast<size_t>(i)]]) << row << " " << i;
    }
    double sum = 0;
    const double largest = of_row[order[0]];
    for (int64_t v = 0; v < vocab; ++v) sum += std::exp(of_row[v] - largest);
    EXPECT_NEAR(top.log_sum_exp[row], largest + std::log(sum), 1e-5 + 1e-6 * std::abs(largest)) << row;
  }
}

class Logits : public HeadTest {
 protected:
  // The CPU's have the same bits over ranks.
  double LogitTolerance() const { return oracle() == Oracle::kCpu ? 0 : RowTolerance(kLogitError); }
  Problem MakeProblem(const Shape& shape) const {
    return RandomProblem({.shape = shape, .type = type(), .logit_deviation = 2.0});
  }
};

INSTANTIATE_TEST_SUITE_P(All, Logits, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(Logits, AgreeWithTheReferenceInEveryShape) {
  for (const Shape& shape : {Shape{1, 1, 1}, Shape{1, 2, 1}, Shape{2, 3, 5}, Shape{7, 257, 33},
                             Shape{16, 256, 64}, Shape{31, 1000, 123}, Shape{65, 511, 17},
                             Shape{129, 300, 40}, Shape{300, 96, 300}, Shape{1, 50257, 123}}) {
    if (!Takes(shape.vocab)) continue;
    SCOPED_TRACE(Describe(shape));
    const Problem problem = MakeProblem(shape);
    HeadUnderTest head(device_.get(), problem);
    EXPECT_LE(RelativeError(LogitsOf(head, problem), Expected(problem).logits), LogitTolerance());
  }
}

TEST_P(Logits, AgreeWithTheReferenceForEveryOption) {
  for (const float scale : {1.0f, 0.25f}) {
    for (const float softcap : {0.0f, 3.0f}) {
      for (const bool biased : {false, true}) {
        SCOPED_TRACE(std::to_string(scale) + " " + std::to_string(softcap) + (biased ? " bias" : ""));
        Problem problem = MakeProblem({20, 700, 72});
        problem.options.logit_scale = scale;
        problem.options.softcap = softcap;
        if (biased) {
          problem.bias.resize(700);
          for (size_t v = 0; v < 700; ++v) problem.bias[v] = 0.01f * static_cast<float>(v % 90) - 0.4f;
        }
        HeadUnderTest head(device_.get(), problem);
        const std::vector<float> logits = LogitsOf(head, problem);
        const Reference reference = Expected(problem);
        EXPECT_LE(RelativeError(logits, reference.logits), LogitTolerance());
        const TopLogits top = TopOf(head, problem, 7);
        ExpectLargest(logits, 700, 7, top);
        EXPECT_LT(RelativeError(top.log_sum_exp, reference.log_sum_exp), RowTolerance(kLogitError));
      }
    }
  }
}

// The bias of a head counts only if it is wanted.
TEST_P(Logits, LeaveTheBiasOut) {
  Problem problem = MakeProblem({5, 300, 24});
  problem.bias.assign(300, 0.5f);
  HeadUnderTest head(device_.get(), problem);
  problem.bias.clear();
  EXPECT_LE(RelativeError(LogitsOf(head, problem), Expected(problem).logits), LogitTolerance());
}

TEST_P(Logits, AreRoundedOnceToTheTypeAskedFor) {
  Problem problem = MakeProblem({9, 1003, 40});
  problem.options.softcap = 20.0f;
  HeadUnderTest head(device_.get(), problem);
  const std::vector<float> exact = LogitsOf(head, problem);
  for (const DataType to : {DataType::kBFloat16, DataType::kFloat16}) {
    EXPECT_TRUE(LogitsAs(to, head, problem, 0, 9) == Narrowed(to, exact)) << Name(to);
  }
}

TEST_P(Logits, OfARowAreTheSameBitsWhateverRowsAreBesideIt) {
  const Problem problem = MakeProblem({200, 777, 96});
  HeadUnderTest head(device_.get(), problem);
  const std::vector<float> all = LogitsOf(head, problem);
  for (const auto& [first, rows] :
       {std::pair<int64_t, int64_t>{0, 1}, {3, 2}, {17, 64}, {100, 100}, {199, 1}}) {
    const std::vector<float> some = LogitsOf(head, problem, first, rows);
    EXPECT_TRUE(SameBits(some.data(), &all[static_cast<size_t>(first * 777)], rows * 777)) << first;
  }
}

TEST_P(Logits, TheLargestAreThoseOfAll) {
  for (const Shape& shape : {Shape{3, 1, 8}, Shape{4, 65, 1}, Shape{40, 900, 24}, Shape{2, 50257, 64}}) {
    if (!Takes(shape.vocab)) continue;
    const auto most = static_cast<int32_t>(std::min<int64_t>(shape.vocab, kernels::kMostTopK));
    const Problem problem = MakeProblem(shape);
    HeadUnderTest head(device_.get(), problem);
    const std::vector<float> logits = LogitsOf(head, problem);
    for (const int32_t top_k : {1, std::min(5, most), most}) {
      SCOPED_TRACE(Describe(shape) + " " + std::to_string(top_k));
      ExpectLargest(logits, shape.vocab, top_k, TopOf(head, problem, top_k));
    }
  }
}

TEST_P(Logits, EqualOnesAreListedInTheOrderOfTheirTokens) {
  Problem problem = MakeProblem({3, 900, 8});
  problem.weight = Narrowed(type(), std::vector<float>(900 * 8, 1.0f));
  HeadUnderTest head(device_.get(), problem);
  const TopLogits top = TopOf(head, problem, 64);
  for (int32_t i = 0; i < 3 * 64; ++i) EXPECT_EQ(top.tokens[static_cast<size_t>(i)], i % 64);
}

TEST_P(Logits, AreThoseThatLossesAreOf) {
  Problem problem = MakeProblem({50, 600, 64});
  problem.options.logit_scale = 0.5f;
  HeadUnderTest head(device_.get(), problem);
  const std::vector<float> losses = head.Run(problem).losses;
  const std::vector<float> logits = LogitsOf(head, problem);
  const TopLogits top = TopOf(head, problem, 1);
  for (size_t row = 0; row < 50; ++row) {
    const float of_label = logits[row * 600 + static_cast<size_t>(problem.labels[row])];
    EXPECT_NEAR(losses[row], top.log_sum_exp[row] - of_label, 2e-5) << row;
  }
}

// Hidden states that are infinite in the head's type, and products that leave fp32.
TEST_P(Logits, OfARowThatOverflowsAreToldSoAndTheOthersAreNotTouched) {
  Problem problem = MakeProblem({6, 300, 40});
  HeadUnderTest head(device_.get(), problem);
  for (const float softcap : {0.0f, 30.0f}) {
    SCOPED_TRACE(softcap);
    problem.options.softcap = softcap;
    const std::vector<float> expected = LogitsOf(head, problem);
    Problem spoiled = problem;
    std::vector<float> x = problem.HiddenStates();
    std::fill_n(x.begin() + 2 * 40, 40, std::numeric_limits<float>::infinity());
    spoiled.hidden_states = Narrowed(type(), x);
    const std::vector<float> logits = LogitsOf(head, spoiled);
    const TopLogits top = TopOf(head, spoiled, 3);
    for (int64_t row = 0; row < 6; ++row) {
      const bool overflows = row == 2;
      EXPECT_EQ(kernels::CountNonFinite(DataType::kFloat32, &logits[static_cast<size_t>(row * 300)], 300),
                overflows ? 300 : 0);
      EXPECT_EQ(std::isnan(top.log_sum_exp[static_cast<size_t>(row)]), overflows);
      for (size_t i = static_cast<size_t>(row) * 3; i < static_cast<size_t>(row) * 3 + 3; ++i) {
        EXPECT_EQ(top.tokens[i] == -1, overflows);
        EXPECT_EQ(std::isnan(top.logits[i]), overflows);
      }
      if (overflows) continue;
      EXPECT_TRUE(
          SameBits(&logits[static_cast<size_t>(row * 300)], &expected[static_cast<size_t>(row * 300)], 300));
    }
  }
}

// Products that fit, but not once they are scaled: what the softcap then says of them is not theirs.
TEST_P(Logits, ThatOverflowBehindASoftcapAreToldSo) {
  Problem problem = MakeProblem({6, 300, 40});
  SetLogit(problem, 2, 17, type() == DataType::kFloat16 ? 1000.0f : 1e6f);
  HeadUnderTest head(device_.get(), problem);
  problem.options.logit_scale = 1e34f;
  problem.options.softcap = 30.0f;
  if (type() == DataType::kFloat16) problem.options.logit_scale = 1e36f;
  const std::vector<float> logits = LogitsOf(head, problem);
  const TopLogits top = TopOf(head, problem, 3);
  EXPECT_TRUE(std::isnan(logits[2 * 300 + 17]));
  for (size_t row = 0; row < 6; ++row) {
    EXPECT_EQ(std::isnan(top.log_sum_exp[row]), row == 2) << row;
    EXPECT_EQ(top.tokens[row * 3] == -1, row == 2) << row;
    EXPECT_EQ(std::isnan(top.logits[row * 3]), row == 2) << row;
  }
}

TEST_P(Logits, BeyondHalfPrecisionAreInfiniteThere) {
  Problem problem = MakeProblem({2, 300, 40});
  SetLogit(problem, 1, 17, type() == DataType::kFloat16 ? 1000.0f : 1e6f);
  problem.options.logit_scale = 1000.0f;
  HeadUnderTest head(device_.get(), problem);
  const std::vector<float> exact = LogitsOf(head, problem);
  EXPECT_GT(exact[300 + 17], 1e5f);
  EXPECT_TRUE(LogitsAs(DataType::kFloat16, head, problem, 0, 2) == Narrowed(DataType::kFloat16, exact));
}

TEST_P(Logits, SeeTheWeightsOfTheirTimeAndLeaveBatchesAndTheGradientAlone) {
  const Problem before = MakeProblem({120, 500, 48});
  Problem after = before;
  after.weight = RandomProblem({.shape = before.shape, .type = type(), .seed = 9}).weight;
  HeadUnderTest head(device_.get(), before);
  const ChunkOutput expected = head.Run(before);
  const std::vector<float> gradient = head.Gradient();
  const std::vector<float> logits = LogitsOf(head, before);
  head.backend().ResetGradient();
  const std::unique_ptr<BatchUnderWay> batch = head.Start(KindOf(before), {RowsOf(before, 0, 120)});
  EXPECT_TRUE(SameBits(LogitsOf(head, before), logits));
  EXPECT_TRUE(SameBits(batch->Await().front().dx, expected.dx));
  EXPECT_TRUE(SameBits(head.Gradient(), gradient));
  head.Publish(after.weight);
  EXPECT_LE(RelativeError(LogitsOf(head, before), Expected(after).logits), LogitTolerance());
  EXPECT_TRUE(SameBits(head.Gradient(), gradient));
}

// Piece by piece, and down to one row at a time.
TEST_P(Logits, NeedNoMoreThanTheWorkspaceThereIs) {
  const Problem problem = MakeProblem({90, 700, 40});
  HeadUnderTest roomy(device_.get(), problem);
  const std::vector<float> expected = LogitsOf(roomy, problem);
  for (int64_t bytes = int64_t{1} << 16; bytes < kWorkspaceBytes; bytes *= 4) {
    absl::StatusOr<std::unique_ptr<Device>> small = GetParam().device.create(bytes);
    ASSERT_TRUE(small.ok()) << small.status();
    if (!(*small)->PlanMemory({"h", 700, 40, type()}).ok()) continue;
    SCOPED_TRACE(bytes);
    HeadUnderTest head(small->get(), problem);
    const std::vector<float> logits = LogitsOf(head, problem);
    if (GetParam().device.bits_depend_on_workspace(type())) {
      EXPECT_LE(RelativeError(logits, Expected(problem).logits), LogitTolerance());
    } else {
      EXPECT_TRUE(SameBits(logits, expected));
    }
    ExpectLargest(logits, 700, 64, TopOf(head, problem, 64));
  }
}

TEST_P(Logits, OfAFrozenHeadAreTheSame) {
  const Problem problem = MakeProblem({5, 300, 24});
  HeadUnderTest trained(device_.get(), problem);
  HeadConfig config = trained.config();
  config.weight_gradients = WeightGradients::kFrozen;
  HeadUnderTest frozen(device_.get(), config);
  frozen.Publish(problem.weight);
  EXPECT_TRUE(SameBits(LogitsOf(frozen, problem), LogitsOf(trained, problem)));
}

}  // namespace
}  // namespace lossd::engine::testing::logits_test
