// What must hold of losses with options whatever their values are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "tests/conformance/head_under_test.h"
#include "tests/unit/kernels/option_cases.h"

namespace lossd::engine::testing::options_properties_test {
namespace {

using kernels::testing::Describe;
using kernels::testing::OptionProblem;
using kernels::testing::OptionProblems;
using kernels::testing::RandomProblem;
using kernels::testing::RelativeError;
using kernels::testing::SameBits;

constexpr size_t kEvery = 4;  // of the table's problems
// What the order of fp32 sums may change.
constexpr double kOrderError = 1e-5;

double Difference(const std::vector<float>& actual, const std::vector<float>& expected) {
  return RelativeError(actual, {expected.begin(), expected.end()});
}

// The same bits, but for numbers so small that fp32 holds them with fewer digits, or not at all.
bool SameUnlessTiny(const std::vector<float>& a, const std::vector<float>& b) {
  constexpr float kTiny = 0x1p-120f;
  return std::ranges::equal(
      a, b, [](float x, float y) { return x == y || (std::fabs(x) < kTiny && std::fabs(y) < kTiny); });
}

std::vector<float> Times(float factor, std::vector<float> values) {
  for (float& value : values) value *= factor;
  return values;
}

template <typename T>
std::vector<T> Part(const std::vector<T>& rows, int64_t first, int64_t count, int64_t columns) {
  return {rows.begin() + first * columns, rows.begin() + (first + count) * columns};
}

// Rows [first, first + count) of what a batch gave.
ChunkOutput Part(const ChunkOutput& whole, int64_t first, int64_t count, int64_t hidden, int64_t top_k) {
  const RowReturnValues& r = whole.returns;
  return {.losses = Part(whole.losses, first, count, 1),
          .dx = Part(whole.dx, first, count, hidden),
          .returns = {.log_sum_exp = Part(r.log_sum_exp, first, count, 1),
                      .z_loss = Part(r.z_loss, first, count, 1),
                      .log_probability = Part(r.log_probability, first, count, 1),
                      .entropy = Part(r.entropy, first, count, 1),
                      .prediction = Part(r.prediction, first, count, 1),
                      .target_rank = Part(r.target_rank, first, count, 1),
                      .divergence = {},
                      .top_tokens = Part(r.top_tokens, first, count, top_k),
                      .top_log_probabilities = Part(r.top_log_probabilities, first, count, top_k)}};
}

// Rows of the hidden states and everything else that belongs to a row, in another order.
Problem Reordered(const Problem& problem, const std::vector<int64_t>& order) {
  const int64_t row_bytes = problem.shape.hidden * kernels::SizeOf(problem.hidden_type);
  Problem reordered = problem;
  for (size_t to = 0; to < order.size(); ++to) {
    const auto from = static_cast<size_t>(order[to]);
    std::copy_n(problem.hidden_states.begin() + order[to] * row_bytes, row_bytes,
                reordered.hidden_states.begin() + static_cast<int64_t>(to) * row_bytes);
    reordered.labels[to] = problem.labels[from];
    if (!problem.token_weights.empty()) reordered.token_weights[to] = problem.token_weights[from];
    if (!problem.lse_gradients.empty()) reordered.lse_gradients[to] = problem.lse_gradients[from];
    if (!problem.entropy_gradients.empty()) reordered.entropy_gradients[to] = problem.entropy_gradients[from];
  }
  return reordered;
}

class OptionProperties : public HeadTest {
 protected:
  // Every option at once, many rows: what no single tile of any kernel holds.
  Problem ManyRows() const {
    Problem problem = RandomProblem({.shape = {300, 517, 72}, .type = type(), .logit_deviation = 2.0});
    problem.options = {
        .logit_scale = 0.75f, .softcap = 6.0f, .label_smoothing = 0.1f, .lse_square_scale = 0.01f};
    std::mt19937_64 random(1);
    std::uniform_real_distribution<float> uniform(0.1f, 2.0f);
    for (std::vector<float>* values :
         {&problem.class_weights, &problem.token_weights, &problem.lse_gradients, &problem.bias}) {
      const bool of_entries = values == &problem.class_weights || values == &problem.bias;
      values->resize(static_cast<size_t>(of_entries ? 517 : 300));
      std::ranges::generate(*values, [&] { return uniform(random); });
    }
    for (size_t r = 0; r < problem.labels.size(); r += 7) problem.labels[r] = kIgnoreIndex;
    return problem;
  }

  std::vector<Problem> Problems() const {
    std::vector<Problem> problems = {ManyRows()};
    // Without softcap smoothing is computed in another way.
    problems.push_back(ManyRows());
    problems.back().options.softcap = 0;
    // Nor is it where entries have the entropy's gradient as well.
    for (const float smoothing : {0.0f, 0.1f}) {
      Problem& problem = problems.emplace_back(ManyRows());
      problem.options.softcap = 0;
      problem.options.label_smoothing = smoothing;
      problem.entropy_gradients = problem.lse_gradients;
    }
    const std::vector<OptionProblem> some = OptionProblems(type());
    for (size_t i = 0; i < some.size(); i += kEvery) problems.push_back(some[i].problem);
    return problems;
  }

  static WantedReturns Wanted(const Problem& problem) {
    WantedReturns wanted = kAllReturns;
    wanted.top_k = static_cast<int32_t>(std::min<int64_t>(problem.shape.vocab, 3));
    return wanted;
  }

  static void ExpectSame(const ChunkOutput& actual, const ChunkOutput& expected) {
    EXPECT_TRUE(SameBits(actual.losses, expected.losses));
    EXPECT_TRUE(SameBits(actual.dx, expected.dx));
    EXPECT_TRUE(SameBits(actual.returns, expected.returns));
  }
};

INSTANTIATE_TEST_SUITE_P(All, OptionProperties, ::testing::ValuesIn(DevicesAndTypes()),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(OptionProperties, RowsHaveTheSameBitsInChunksOfAnySize) {
  for (const Problem& problem : Problems()) {
    SCOPED_TRACE(Describe(problem.shape));
    const int64_t tokens = problem.shape.tokens;
    BatchKey kind = KindOf(problem);
    kind.returns = Wanted(problem);
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput whole = head.Run(problem, kind.returns);
    const std::vector<float> gradient = head.Gradient();
    const std::vector<float> bias_gradient = head.BiasGradient();
    head.backend().ResetGradient();
    std::vector<int64_t> sizes;
    for (int64_t left = tokens, size = 1; left > 0; size = 3 * size + 1) {
      sizes.push_back(std::min(left, size));
      left -= sizes.back();
    }
    std::vector<ChunkInput> chunks;
    int64_t first = 0;
    for (const int64_t size : sizes) {
      chunks.push_back(RowsOf(problem, first, size));
      first += size;
    }
    const std::vector<ChunkOutput> outputs = head.Run(kind, chunks);
    first = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      ExpectSame(outputs[i], Part(whole, first, sizes[i], problem.shape.hidden, kind.returns.top_k));
      first += sizes[i];
    }
    EXPECT_LT(Difference(head.Gradient(), gradient), GradientError());
    EXPECT_LT(Difference(head.BiasGradient(), bias_gradient), GradientError());
  }
}

TEST_P(OptionProperties, RowsMayComeInAnyOrder) {
  for (const Problem& problem : Problems()) {
    SCOPED_TRACE(Describe(problem.shape));
    std::vector<int64_t> order(static_cast<size_t>(problem.shape.tokens));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, std::mt19937_64(7));
    const WantedReturns wanted = Wanted(problem);
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput straight = head.Run(problem, wanted);
    const std::vector<float> gradient = head.Gradient();
    const std::vector<float> bias_gradient = head.BiasGradient();
    head.backend().ResetGradient();
    const ChunkOutput shuffled = head.Run(Reordered(problem, order), wanted);
    for (size_t to = 0; to < order.size(); ++to) {
      ExpectSame(Part(shuffled, static_cast<int64_t>(to), 1, problem.shape.hidden, wanted.top_k),
                 Part(straight, order[to], 1, problem.shape.hidden, wanted.top_k));
    }
    EXPECT_LT(Difference(head.Gradient(), gradient), GradientError());
    EXPECT_LT(Difference(head.BiasGradient(), bias_gradient), GradientError());
  }
}

TEST_P(OptionProperties, TwiceTheScaleGivesExactlyTwiceTheGradients) {
  for (Problem problem : Problems()) {
    SCOPED_TRACE(Describe(problem.shape));
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput once = head.Run(problem);
    const std::vector<float> gradient = head.Gradient();
    const std::vector<float> bias_gradient = head.BiasGradient();
    head.backend().ResetGradient();
    problem.gradient_scale *= 2;
    if (problem.z_gradient_scale.has_value()) *problem.z_gradient_scale *= 2;
    const ChunkOutput twice = head.Run(problem);
    EXPECT_TRUE(SameBits(twice.losses, once.losses));
    EXPECT_TRUE(SameUnlessTiny(twice.dx, Times(2, once.dx)));
    EXPECT_TRUE(SameUnlessTiny(head.Gradient(), Times(2, gradient)));
    EXPECT_TRUE(SameUnlessTiny(head.BiasGradient(), Times(2, bias_gradient)));
  }
}

TEST_P(OptionProperties, TheSameRowsAgainDoubleTheWeightGradient) {
  for (const Problem& problem : Problems()) {
    SCOPED_TRACE(Describe(problem.shape));
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput once = head.Run(problem);
    const std::vector<float> gradient = head.Gradient();
    const std::vector<float> bias_gradient = head.BiasGradient();
    ExpectSame(head.Run(problem), once);
    EXPECT_LT(Difference(head.Gradient(), Times(2, gradient)), kOrderError);
    EXPECT_TRUE(SameUnlessTiny(head.BiasGradient(), Times(2, bias_gradient)));
  }
}

TEST_P(OptionProperties, LossOnlyTellsTheSameAndAddsNothing) {
  for (const Problem& problem : Problems()) {
    SCOPED_TRACE(Describe(problem.shape));
    BatchKey kind = KindOf(problem);
    kind.returns = Wanted(problem);
    HeadUnderTest head(device_.get(), problem);
    const std::vector<ChunkInput> rows = {RowsOf(problem, 0, problem.shape.tokens)};
    ChunkOutput whole = head.Run(kind, rows).front();
    const std::vector<float> gradient = head.Gradient();
    const std::vector<float> bias_gradient = head.BiasGradient();
    kind.mode = ComputeMode::kLossOnly;
    whole.dx.clear();
    ExpectSame(head.Run(kind, rows).front(), whole);
    EXPECT_TRUE(SameBits(head.Gradient(), gradient));
    EXPECT_TRUE(SameBits(head.BiasGradient(), bias_gradient));
  }
}

TEST_P(OptionProperties, ARowOfNoWeightIsAsIfItWereIgnored) {
  std::vector<Problem> problems = Problems();
  // A gradient so small that 16 bits hold it only over a power of two, which no other row may choose.
  problems.push_back(ManyRows());
  problems.back().gradient_scale = 0x1p-24f;
  for (Problem problem : problems) {
    SCOPED_TRACE(Describe(problem.shape));
    if (problem.token_weights.empty()) problem.token_weights.assign(problem.labels.size(), 1.0f);
    Problem without = problem;
    for (size_t r = 0; r < problem.labels.size(); r += 2) {
      for (std::vector<float>* factors :
           {&problem.token_weights, &problem.lse_gradients, &problem.entropy_gradients}) {
        if (!factors->empty()) (*factors)[r] = 0;
      }
      without.labels[r] = kIgnoreIndex;
    }
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput ignored = head.Run(without);
    const std::vector<float> gradient = head.Gradient();
    const std::vector<float> bias_gradient = head.BiasGradient();
    head.backend().ResetGradient();
    // It is computed if something is wanted that has no weight, otherwise not.
    const ChunkOutput told = head.Run(problem, {.log_sum_exp = true});
    for (size_t i = 0; i < ignored.losses.size(); ++i) EXPECT_EQ(told.losses[i], ignored.losses[i]);
    for (size_t i = 0; i < ignored.dx.size(); ++i) EXPECT_EQ(told.dx[i], ignored.dx[i]);
    EXPECT_LT(Difference(head.Gradient(), gradient), GradientError());
    EXPECT_LT(Difference(head.BiasGradient(), bias_gradient), GradientError());
    head.backend().ResetGradient();
    ExpectSame(head.Run(problem), ignored);
    EXPECT_TRUE(SameBits(head.Gradient(), gradient));
    EXPECT_TRUE(SameBits(head.BiasGradient(), bias_gradient));
  }
}

// Nothing of a row whose factors are all 0 is computed: not even that it overflows.
TEST_P(OptionProperties, ARowOfNoWeightCostsNothing) {
  Problem problem = RandomProblem({.shape = {5, 300, 24}, .type = type()});
  problem.token_weights = {1, 0, 1, 0, 1};
  std::vector<float> x = problem.HiddenStates();
  std::fill_n(x.begin() + 24, 24, 3e38f);
  problem.hidden_type = DataType::kFloat32;
  problem.hidden_states = kernels::testing::Narrowed(DataType::kFloat32, x);
  HeadUnderTest head(device_.get(), problem);
  EXPECT_TRUE(std::isnan(head.Run(problem, {.log_sum_exp = true}).losses[1]));
  const ChunkOutput output = head.Run(problem);
  EXPECT_EQ(output.losses[1], 0.0f);
  for (int64_t i = 24; i < 48; ++i) EXPECT_EQ(output.dx[static_cast<size_t>(i)], 0.0f);
}

TEST_P(OptionProperties, FactorsBeyondAllRangeDoNotReachTheWeightGradient) {
  for (const float softcap : {0.0f, 6.0f}) {
    for (const float smoothing : {0.0f, 0.1f}) {
      SCOPED_TRACE("softcap " + std::to_string(softcap) + ", smoothing " + std::to_string(smoothing));
      Problem problem = RandomProblem({.shape = {5, 300, 24}, .type = type()});
      problem.options.softcap = softcap;
      problem.options.label_smoothing = smoothing;
      problem.gradient_scale = 1e20f;
      problem.token_weights.assign(5, 1.0f);
      problem.lse_gradients.assign(5, 0.0f);
      problem.token_weights[2] = 1e20f;
      problem.lse_gradients[2] = -1e20f;
      const auto row_bytes = static_cast<int64_t>(problem.hidden_states.size() / 5);
      std::fill_n(problem.hidden_states.begin() + 2 * row_bytes, row_bytes, 0);
      HeadUnderTest head(device_.get(), problem);
      const ChunkOutput output = head.Run(problem);
      EXPECT_TRUE(std::isnan(output.losses[2])) << "the row says so";
      const std::vector<float> gradient = head.Gradient();
      const std::vector<float> bias_gradient = head.BiasGradient();
      head.backend().ResetGradient();
      problem.labels[2] = kIgnoreIndex;
      head.Run(problem);
      EXPECT_LT(Difference(gradient, head.Gradient()), GradientError());
    }
  }
}

// The loss and its gradients from two halves of the vocabulary, each a head of its own, that know nothing of
// each other: first ℓ of each half, then what is upstream of it. So it is with any loss made of ℓ and the
// label's log-probability.
TEST_P(OptionProperties, ShardsOfTheVocabularySumToTheWhole) {
  Problem whole = RandomProblem({.shape = {33, 400, 40}, .type = type(), .logit_deviation = 3.0});
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  whole.bias.resize(400);
  std::ranges::generate(whole.bias, [&] { return normal(random); });
  constexpr int64_t kHalf = 200;
  HeadUnderTest head(device_.get(), whole);
  const ChunkOutput expected = head.Run(whole, kAllReturns);
  const std::vector<float> gradient = head.Gradient();
  const std::vector<float> bias_gradient = head.BiasGradient();

  const auto tokens = static_cast<size_t>(whole.shape.tokens);
  std::vector<Problem> shards(2, whole);
  std::vector<std::vector<float>> lse;
  for (int64_t shard = 0; shard < 2; ++shard) {
    Problem& half = shards[static_cast<size_t>(shard)];
    half.shape.vocab = kHalf;
    half.weight = Part(whole.weight, shard * kHalf, kHalf, 40 * kernels::SizeOf(type()));
    half.bias = Part(whole.bias, shard * kHalf, kHalf, 1);
    half.token_weights.assign(tokens, 1.0f);
    for (size_t r = 0; r < tokens; ++r) {
      half.labels[r] = whole.labels[r] - shard * kHalf;
      if (half.labels[r] >= 0 && half.labels[r] < kHalf) continue;
      half.labels[r] = 0;  // any: its weight is 0
      half.token_weights[r] = 0.0f;
    }
    lse.push_back(HeadUnderTest(device_.get(), half).Run(half, kAllReturns).returns.log_sum_exp);
  }
  std::vector<float> dx(expected.dx.size());
  std::vector<float> dw;
  std::vector<float> db;
  for (size_t shard = 0; shard < 2; ++shard) {
    Problem& half = shards[shard];
    for (size_t r = 0; r < tokens; ++r) {
      const double all =
          std::log(std::exp(static_cast<double>(lse[0][r])) + std::exp(static_cast<double>(lse[1][r])));
      EXPECT_NEAR(all, expected.returns.log_sum_exp[r], 1e-5 * (1 + std::fabs(all)));
      // The half's own loss has its ℓ with factor 1; the whole has its share of all.
      half.lse_gradients.push_back(static_cast<float>(std::exp(lse[shard][r] - all)) - half.token_weights[r]);
    }
    HeadUnderTest part(device_.get(), half);
    const ChunkOutput output = part.Run(half);
    for (size_t i = 0; i < dx.size(); ++i) dx[i] += output.dx[i];
    const std::vector<float> rows = part.Gradient();
    dw.insert(dw.end(), rows.begin(), rows.end());
    const std::vector<float> bias_rows = part.BiasGradient();
    db.insert(db.end(), bias_rows.begin(), bias_rows.end());
  }
  EXPECT_LT(Difference(dx, expected.dx), 2 * GradientError());
  EXPECT_LT(Difference(dw, gradient), 2 * GradientError());
  EXPECT_LT(Difference(db, bias_gradient), 2 * GradientError());
}

// On a head with a bias, chunks that do without are as on a head that has none, whichever comes first.
TEST_P(OptionProperties, ChunksWithoutTheBiasAddNothingToItsGradient) {
  Problem with = ManyRows();
  with.options.softcap = 0;
  Problem without = with;
  without.bias.clear();
  HeadUnderTest plain(device_.get(), without);
  const ChunkOutput expected = plain.Run(without);
  HeadUnderTest head(device_.get(), with);
  head.Run(with);
  const std::vector<float> gradient = head.Gradient();
  const std::vector<float> bias_gradient = head.BiasGradient();
  head.backend().ResetGradient();
  ExpectSame(head.Run(without), expected);
  EXPECT_TRUE(SameBits(head.Gradient(), plain.Gradient()));
  EXPECT_TRUE(SameBits(head.BiasGradient(), std::vector<float>(517))) << "not what was in it before";
  head.Run(with);
  EXPECT_TRUE(SameBits(head.BiasGradient(), bias_gradient));
  head.Run(without);
  EXPECT_TRUE(SameBits(head.BiasGradient(), bias_gradient));
  EXPECT_GT(Difference(head.Gradient(), gradient), 0.1) << "all of them are in dW";
}

TEST_P(OptionProperties, EqualLogitsAreEquallyLikely) {
  constexpr int64_t kVocab = 1000;
  for (const float softcap : {0.0f, 2.0f}) {
    Problem problem = RandomProblem({.shape = {3, kVocab, 8}, .type = type()});
    problem.weight = kernels::testing::Narrowed(type(), std::vector<float>(kVocab * 8, 1.0f));
    problem.options.softcap = softcap;
    problem.options.label_smoothing = 0.5f;
    HeadUnderTest head(device_.get(), problem);
    const ChunkOutput output = head.Run(problem, kAllReturns);
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_NEAR(output.losses[r], std::log(1000.0), 2e-5);
      EXPECT_NEAR(output.returns.entropy[r], std::log(1000.0), 2e-5);
      EXPECT_EQ(output.returns.prediction[r], 0) << "ties go to the lowest token";
      EXPECT_EQ(output.returns.target_rank[r], 0);
      EXPECT_EQ(Part(output.returns.top_tokens, static_cast<int64_t>(r), 1, 3),
                (std::vector<int32_t>{0, 1, 2}));
    }
  }
}

TEST_P(OptionProperties, AFrozenHeadGivesTheSameInputGradientsAndTakesNoMemoryForItsOwn) {
  for (const Problem& problem : Problems()) {
    SCOPED_TRACE(Describe(problem.shape));
    HeadUnderTest usual(device_.get(), problem);
    HeadConfig config = usual.config();
    config.weight_gradients = WeightGradients::kFrozen;
    HeadUnderTest frozen(device_.get(), config);
    frozen.Publish(problem.weight, problem.bias);
    const WantedReturns wanted = Wanted(problem);
    ExpectSame(frozen.Run(problem, wanted), usual.Run(problem, wanted));
    const MemoryPlan memory = frozen.backend().MemoryReport();
    const auto is_gradient = [](const MemoryItem& item) {
      return item.purpose == "gradient" && item.bytes > 0;
    };
    EXPECT_TRUE(std::ranges::none_of(memory, is_gradient));
  }
}

}  // namespace
}  // namespace lossd::engine::testing::options_properties_test
