#include "tests/conformance/option_cases.h"

#include <functional>
#include <random>

#include "absl/strings/str_cat.h"

namespace lossd::engine::testing {
namespace {

using kernels::DataType;
using kernels::testing::Problem;
using kernels::testing::RandomProblem;

constexpr int64_t kIgnored = -100;

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}

  int64_t Between(int64_t low, int64_t high) { return std::uniform_int_distribution(low, high)(random_); }
  float Between(float low, float high) { return std::uniform_real_distribution(low, high)(random_); }
  bool Chance(double share) { return std::bernoulli_distribution(share)(random_); }
  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Between(int64_t{0}, static_cast<int64_t>(values.size()) - 1)];
  }
  // Some of them exactly zero.
  std::vector<float> Values(int64_t count, float low, float high) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = Chance(0.2) ? 0.0f : Between(low, high);
    return values;
  }
  // At least one of them is not zero.
  std::vector<float> ClassWeights(int64_t vocab) {
    std::vector<float> weights = Values(vocab, 0.1f, 2.0f);
    weights[static_cast<size_t>(Between(int64_t{0}, vocab - 1))] = 1.0f;
    return weights;
  }

 private:
  std::mt19937_64 random_;
};

void Ignore(Problem& problem, double share, Dice& dice) {
  for (int64_t& label : problem.labels) {
    if (dice.Chance(share)) label = kIgnored;
  }
}

}  // namespace

std::vector<OptionCase> OptionsAlone(DataType type) {
  Problem plain = RandomProblem({.shape = {37, 311, 45}, .type = type, .logit_deviation = 2.0});
  Dice dice(1);
  Ignore(plain, 0.2, dice);
  std::vector<OptionCase> cases;
  const auto add = [&](const std::string& name, const std::function<void(Problem&)>& change) {
    cases.push_back({name, plain});
    change(cases.back().problem);
  };
  add("nothing", [](Problem&) {});
  for (const float value : {0.01f, 0.1f, 0.5f, 1.0f}) {
    add(absl::StrCat("label_smoothing ", value), [=](Problem& p) { p.options.label_smoothing = value; });
  }
  for (const float value : {1e-4f, 0.1f, 2.0f}) {
    add(absl::StrCat("lse_square_scale ", value), [=](Problem& p) { p.options.lse_square_scale = value; });
  }
  for (const float value : {0.25f, 2.0f, 30.0f, 1000.0f}) {
    add(absl::StrCat("softcap ", value), [=](Problem& p) { p.options.softcap = value; });
  }
  for (const float value : {0.03125f, 0.7f, 4.0f}) {
    add(absl::StrCat("logit_scale ", value), [=](Problem& p) { p.options.logit_scale = value; });
  }
  add("class_weights", [&](Problem& p) { p.class_weights = dice.ClassWeights(p.shape.vocab); });
  add("token_weights", [&](Problem& p) { p.token_weights = dice.Values(p.shape.tokens, -1.0f, 2.0f); });
  add("lse_gradients", [&](Problem& p) { p.lse_gradients = dice.Values(p.shape.tokens, -1.0f, 1.0f); });
  for (const float value : {0.5f, 8.0f}) {
    add(absl::StrCat("bias ", value),
        [&](Problem& p) { p.bias = dice.Values(p.shape.vocab, -value, value); });
  }
  add("z_gradient_scale", [](Problem& p) {
    p.options.lse_square_scale = 0.1f;
    p.z_gradient_scale = 3.0f * p.gradient_scale;
  });
  // Beside every other, as it changes how gradients are formed.
  for (size_t i = 0, alone = cases.size(); i < alone; ++i) {
    OptionCase with = cases[i];
    absl::StrAppend(&with.name, " and entropy_gradients");
    with.problem.entropy_gradients = dice.Values(plain.shape.tokens, -1.0f, 1.0f);
    cases.push_back(std::move(with));
  }
  return cases;
}

OptionCase RandomOptions(DataType type, uint64_t seed) {
  Dice dice(seed);
  const int64_t tokens = dice.Chance(0.1) ? 1 : dice.Between(int64_t{2}, int64_t{40});
  const int64_t vocab =
      dice.Chance(0.1) ? dice.Between(int64_t{1}, int64_t{4}) : dice.Between(int64_t{5}, int64_t{700});
  const int64_t hidden = dice.Between(int64_t{1}, int64_t{80});
  Problem problem = RandomProblem({.shape = {tokens, vocab, hidden},
                                   .type = type,
                                   .logit_deviation = dice.OneOf({0.1, 1.0, 3.0, 8.0}),
                                   .seed = seed});
  Ignore(problem, dice.OneOf({0.0, 0.0, 0.3, 0.9}), dice);
  kernels::LossOptions& options = problem.options;
  if (dice.Chance(0.5)) options.label_smoothing = dice.OneOf({0.01f, 0.1f, 0.3f, 1.0f});
  if (dice.Chance(0.5)) options.lse_square_scale = dice.OneOf({1e-4f, 0.01f, 1.0f});
  if (dice.Chance(0.4)) options.softcap = dice.OneOf({0.5f, 5.0f, 30.0f});
  if (dice.Chance(0.4)) options.logit_scale = dice.OneOf({0.125f, 0.7f, 2.5f});
  if (dice.Chance(0.4)) problem.class_weights = dice.ClassWeights(vocab);
  if (dice.Chance(0.4)) problem.token_weights = dice.Values(tokens, -1.0f, 2.0f);
  if (dice.Chance(0.4)) problem.lse_gradients = dice.Values(tokens, -1.0f, 1.0f);
  if (dice.Chance(0.3)) problem.z_gradient_scale = dice.Between(0.0f, 2.0f) * problem.gradient_scale;
  if (dice.Chance(0.4)) {
    const float size = dice.OneOf({0.1f, 2.0f, 6.0f});
    problem.bias = dice.Values(vocab, -size, size);
  }
  if (dice.Chance(0.4)) problem.entropy_gradients = dice.Values(tokens, -1.0f, 1.0f);
  return {absl::StrCat("seed ", seed), std::move(problem)};
}

std::string DescribeOptions(const Problem& problem) {
  const kernels::LossOptions& o = problem.options;
  std::string text = absl::StrCat(Describe(problem.shape), ", scale ", o.logit_scale, ", softcap ", o.softcap,
                                  ", smoothing ", o.label_smoothing, ", z ", o.lse_square_scale);
  if (!problem.bias.empty()) absl::StrAppend(&text, ", bias");
  if (!problem.class_weights.empty()) absl::StrAppend(&text, ", class weights");
  if (!problem.token_weights.empty()) absl::StrAppend(&text, ", token weights");
  if (!problem.lse_gradients.empty()) absl::StrAppend(&text, ", lse gradients");
  if (!problem.entropy_gradients.empty()) absl::StrAppend(&text, ", entropy gradients");
  if (problem.z_gradient_scale.has_value()) {
    absl::StrAppend(&text, ", z gradient scale ", *problem.z_gradient_scale);
  }
  return text;
}

}  // namespace lossd::engine::testing
