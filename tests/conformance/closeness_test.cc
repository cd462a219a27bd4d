// How close results are to fp64, compared with plain arithmetic in the same type: the criteria of
// docs/numerics.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <tuple>

#include "tests/conformance/comparison.h"
#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing::closeness_test {
namespace {

using kernels::testing::Narrowed;
using kernels::testing::RandomProblem;
using kernels::testing::RelativeError;
using kernels::testing::Shape;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

enum class Labels {
  kRandom,
  kLikely,  // every row's hidden state points at its label's weights: p is nearly 1
};

struct Case {
  const char* name;
  Shape shape;
  double logit_deviation;
  Labels labels = Labels::kRandom;
  int most_seeds = 1000;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

// Makes row r's logit of its label about `logit`.
void PointAtLabels(Problem& problem, float logit) {
  const auto [n, v, h] = problem.shape;
  const std::vector<float> weight = problem.Weight();
  std::vector<float> x = problem.HiddenStates();
  for (int64_t r = 0; r < n; ++r) {
    const float* w = &weight[problem.labels[r] * h];
    float norm = 0;
    for (int64_t i = 0; i < h; ++i) norm += w[i] * w[i];
    for (int64_t i = 0; i < h; ++i) x[r * h + i] = 0.1f * x[r * h + i] + logit / norm * w[i];
  }
  problem.hidden_states = Narrowed(problem.hidden_type, x);
}

// As many values as asked for, evenly from one to the other.
std::vector<float> Spread(int64_t count, float first, float last) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    values[static_cast<size_t>(i)] =
        first + (last - first) * static_cast<float>(i * 37 % count) / static_cast<float>(count);
  }
  return values;
}

class Closeness : public ::testing::TestWithParam<std::tuple<DeviceUnderTest, Case, DataType>>,
                  protected OnDevice {
 protected:
  void SetUp() override { CreateDeviceFor(std::get<0>(GetParam()), std::get<2>(GetParam())); }
};

TEST_P(Closeness, IsThatOfPlainArithmeticOrBetter) {
  const Case& c = std::get<1>(GetParam());
  const DataType type = std::get<2>(GetParam());
  Comparison comparison;
  for (int seed = 1; seed <= std::min(c.most_seeds, ClosenessSeeds()); ++seed) {
    Problem problem = RandomProblem({.shape = c.shape,
                                     .type = type,
                                     .logit_deviation = c.logit_deviation,
                                     .seed = static_cast<uint64_t>(seed)});
    if (c.labels == Labels::kLikely) PointAtLabels(problem, 20.0f);
    comparison.Add(device_.get(), problem);
  }
  std::cout << c.name << " " << Name(type) << ": " << comparison.ToText() << "\n";
  comparison.ExpectCloseEnough(type);
}

struct OptionsCase {
  const char* name;
  void (*set)(Problem& problem);
};

std::ostream& operator<<(std::ostream& out, const OptionsCase& c) { return out << c.name; }

// The values that are in use, and stronger ones.
const OptionsCase kOptions[] = {
    {"LabelSmoothing", [](Problem& p) { p.options.label_smoothing = 0.1f; }},
    {"ZLoss", [](Problem& p) { p.options.lse_square_scale = 1e-4f; }},
    {"StrongZLoss", [](Problem& p) { p.options.lse_square_scale = 0.1f; }},
    {"Softcap", [](Problem& p) { p.options.softcap = 30.0f; }},
    {"TightSoftcap", [](Problem& p) { p.options.softcap = 2.0f; }},
    {"LogitScale", [](Problem& p) { p.options.logit_scale = 0.25f; }},
    {"ClassWeights", [](Problem& p) { p.class_weights = Spread(p.shape.vocab, 0.2f, 2.0f); }},
    {"TokenWeights", [](Problem& p) { p.token_weights = Spread(p.shape.tokens, -0.5f, 2.0f); }},
    {"LseGradients", [](Problem& p) { p.lse_gradients = Spread(p.shape.tokens, -0.5f, 0.5f); }},
    {"EntropyGradients", [](Problem& p) { p.entropy_gradients = Spread(p.shape.tokens, -0.5f, 0.5f); }},
    {"EntropyGradientsAlone",
     [](Problem& p) {
       p.token_weights.assign(static_cast<size_t>(p.shape.tokens), 0.0f);
       p.entropy_gradients = Spread(p.shape.tokens, 0.1f, 1.0f);
     }},
    {"Bias", [](Problem& p) { p.bias = Spread(p.shape.vocab, -1.0f, 1.0f); }},
    {"BiasWithSmoothing",
     [](Problem& p) {
       p.bias = Spread(p.shape.vocab, -1.0f, 1.0f);
       p.options.label_smoothing = 0.1f;
     }},
    {"SmoothingUnderSoftcap", [](Problem& p) { p.options = {.softcap = 15.0f, .label_smoothing = 0.1f}; }},
    {"Everything",
     [](Problem& p) {
       p.options = {
           .logit_scale = 0.7f, .softcap = 15.0f, .label_smoothing = 0.1f, .lse_square_scale = 1e-3f};
       p.bias = Spread(p.shape.vocab, -1.0f, 1.0f);
       p.class_weights = Spread(p.shape.vocab, 0.2f, 2.0f);
       p.token_weights = Spread(p.shape.tokens, 0.1f, 2.0f);
       p.lse_gradients = Spread(p.shape.tokens, -0.1f, 0.1f);
       p.entropy_gradients = Spread(p.shape.tokens, -0.1f, 0.1f);
     }},
};

class OptionsCloseness : public ::testing::TestWithParam<std::tuple<DeviceUnderTest, OptionsCase, DataType>>,
                         protected OnDevice {
 protected:
  void SetUp() override { CreateDeviceFor(std::get<0>(GetParam()), std::get<2>(GetParam())); }
};

TEST_P(OptionsCloseness, IsThatOfPlainArithmeticOrBetter) {
  const OptionsCase& c = std::get<1>(GetParam());
  const DataType type = std::get<2>(GetParam());
  Comparison comparison;
  for (int seed = 1; seed <= ClosenessSeeds(); ++seed) {
    for (const double deviation : {0.3, 3.0}) {
      Problem problem = RandomProblem({.shape = {64, 512, 128},
                                       .type = type,
                                       .logit_deviation = deviation,
                                       .seed = static_cast<uint64_t>(seed)});
      c.set(problem);
      comparison.Add(device_.get(), problem);
    }
  }
  std::cout << "option " << c.name << " " << Name(type) << ": " << comparison.ToText() << "\n";
  comparison.ExpectCloseEnough(type);
}

std::vector<DeviceUnderTest> JudgedClosely() {
  std::vector<DeviceUnderTest> devices = DevicesUnderTest();
  std::erase_if(devices, [](const DeviceUnderTest& device) { return !device.judged_closely; });
  return devices;
}

INSTANTIATE_TEST_SUITE_P(All, OptionsCloseness,
                         ::testing::Combine(::testing::ValuesIn(JudgedClosely()),
                                            ::testing::ValuesIn(kOptions), ::testing::ValuesIn(kTypes)),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + "_" + std::get<1>(test.param).name + "_" +
                                  Name(std::get<2>(test.param));
                         });

const int64_t kManyRows = kSanitized ? 5 : ClosenessSeeds() < 32 ? 85 : 425;

const Case kCases[] = {
    {"NearlyUniform", {64, 512, 128}, 0.1},
    {"Moderate", {64, 512, 128}, 1.0},
    {"Peaked", {64, 512, 128}, 3.0},
    {"VeryPeaked", {64, 512, 128}, 10.0},
    {"RaggedInEveryDirection", {37, 777, 123}, 1.0},
    {"SingleRow", {1, 1000, 123}, 2.0},
    {"ManyRowsOfFewEntries", {425, 33, 123}, 2.0},
    {"TargetsNearCertainty", {64, 512, 128}, 1.0, Labels::kLikely},
    {"LogitsInTheThousands", {32, 512, 128}, 2500.0},
    {"LargeVocabulary", {kSanitized ? 3 : 64, 50257, 123}, 0.3, Labels::kRandom, 1},
    {"LargeVocabularyPeaked", {kSanitized ? 2 : 16, 50257, 123}, 3.0, Labels::kRandom, 1},
    {"LargeVocabularySingleRow", {1, 50257, 123}, 1.0, Labels::kRandom, kSanitized ? 1 : 4},
    {"ManyRowsOfALargeVocabulary", {kManyRows, 50257, 123}, 1.0, Labels::kRandom, 1},
};

INSTANTIATE_TEST_SUITE_P(All, Closeness,
                         ::testing::Combine(::testing::ValuesIn(JudgedClosely()), ::testing::ValuesIn(kCases),
                                            ::testing::ValuesIn(kTypes)),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + "_" + std::get<1>(test.param).name + "_" +
                                  Name(std::get<2>(test.param));
                         });

TEST(ErrorMeasures, NaNNeverPasses) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(RelativeError({1.0f, nan}, {1.0, 2.0}) <= 1e300);
  EXPECT_FALSE(RelativeError({1.0f, 2.0f}, {1.0, nan}) <= 1e300);
  EXPECT_FALSE(WorstUlp({nan}, {1.0}) <= 4);
  EXPECT_GT(RelativeError({1.0f, 2.1f}, {1.0, 2.0}), 0.01);
}

}  // namespace
}  // namespace lossd::engine::testing::closeness_test
