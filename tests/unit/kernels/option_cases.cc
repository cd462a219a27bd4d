#include "tests/unit/kernels/option_cases.h"

#include <random>
#include <utility>

namespace lossd::kernels::testing {
namespace {

struct Option {
  const char* name;
  std::vector<float> values;  // a usual one first
  void (*set)(Problem& problem, float value);
  bool with_lists = true;
};

const std::vector<Option>& Options() {
  static const std::vector<Option> options = {
      {"label smoothing",
       {0.1f, 0.01f, 0.5f, 1.0f},
       [](Problem& p, float value) { p.options.label_smoothing = value; },
       false},
      {"z-loss",
       {0.01f, 1e-4f, 0.1f, 2.0f},
       [](Problem& p, float value) { p.options.lse_square_scale = value; }},
      {"z-loss gradient",
       {1.7f, 3.0f, 0.5f},
       [](Problem& p, float value) {
         if (p.options.lse_square_scale == 0) p.options.lse_square_scale = 0.02f;
         p.z_gradient_scale = value * p.gradient_scale;
       }},
      {"softcap", {3.0f, 0.25f, 30.0f, 1000.0f}, [](Problem& p, float value) { p.options.softcap = value; }},
      {"logit scale", {0.7f, 0.03125f, 2.5f}, [](Problem& p, float value) { p.options.logit_scale = value; }},
      {"class weights",
       {2.0f},
       [](Problem& p, float value) { p.class_weights = Spread(p.shape.vocab, 0.1f, value); }},
      {"token weights",
       {2.0f},
       [](Problem& p, float value) { p.token_weights = Spread(p.shape.tokens, -0.5f, value); }},
      {"log-sum-exp gradients",
       {1.0f},
       [](Problem& p, float value) { p.lse_gradients = Spread(p.shape.tokens, -0.5f * value, value); }},
      {"entropy gradients",
       {1.0f},
       [](Problem& p, float value) { p.entropy_gradients = Spread(p.shape.tokens, value, -0.5f * value); }},
      {"bias",
       {2.0f, 0.5f, 8.0f},
       [](Problem& p, float value) { p.bias = Spread(p.shape.vocab, -value, value); }},
  };
  return options;
}

std::vector<const Option*> OptionsBeside(Beside beside) {
  std::vector<const Option*> chosen;
  for (const Option& option : Options()) {
    if (beside == Beside::kNothing || option.with_lists) chosen.push_back(&option);
  }
  return chosen;
}

// The option's values in turn.
OptionCase CaseOf(const Option& option, size_t turn) {
  const float value = option.values[turn % option.values.size()];
  return {std::string(option.name) + " " + std::to_string(value),
          [set = option.set, value](Problem& problem) { set(problem, value); }};
}

OptionCase Both(const OptionCase& one, const OptionCase& other) {
  return {one.name + ", " + other.name, [first = one.set, second = other.set](Problem& problem) {
            first(problem);
            second(problem);
          }};
}

// Every two of the options, the nth pair with the values of turn_of(n).
std::vector<OptionCase> Pairs(const std::vector<const Option*>& options, size_t (*turn_of)(size_t)) {
  std::vector<OptionCase> pairs;
  for (size_t i = 0; i < options.size(); ++i) {
    for (size_t j = i + 1; j < options.size(); ++j) {
      const size_t turn = turn_of(pairs.size());
      pairs.push_back(Both(CaseOf(*options[i], turn), CaseOf(*options[j], turn)));
    }
  }
  return pairs;
}

void IgnoreRows(Problem& problem, double share) {
  std::mt19937_64 random(7);
  std::bernoulli_distribution ignored(share);
  for (int64_t& label : problem.labels) {
    if (ignored(random)) label = -100;
  }
}

// Shapes, spreads and shares differ in how many there are, so that they meet in many ways.
Problem PlainProblem(DataType type, size_t number) {
  constexpr Shape kShapes[] = {{37, 311, 45}, {1, 700, 80}, {40, 4, 1},
                               {24, 513, 64}, {2, 257, 33}, {33, 96, 7}};
  constexpr double kDeviations[] = {2.0, 0.1, 8.0, 1.0, 3.0};
  constexpr double kIgnored[] = {0.2, 0.0, 0.9, 0.0};
  Problem problem = RandomProblem({.shape = kShapes[number % std::size(kShapes)],
                                   .type = type,
                                   .logit_deviation = kDeviations[number % std::size(kDeviations)],
                                   .seed = 1 + number});
  IgnoreRows(problem, kIgnored[number % std::size(kIgnored)]);
  return problem;
}

}  // namespace

std::vector<float> Spread(int64_t count, float low, float high) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const float place = static_cast<float>(i * 37 % 101) / 100.0f;
    values[static_cast<size_t>(i)] = i % 7 == 3 ? 0.0f : low + (high - low) * place;
  }
  return values;
}

std::vector<OptionCase> OptionsAlone(Beside beside) {
  std::vector<OptionCase> cases = {{"nothing", [](Problem&) {}}};
  for (const Option* option : OptionsBeside(beside)) cases.push_back(CaseOf(*option, 0));
  return cases;
}

OptionCase AllOptions(Beside beside) {
  OptionCase all{"", [](Problem&) {}};
  for (const Option* option : OptionsBeside(beside)) all = Both(all, CaseOf(*option, 0));
  all.name = "all";
  return all;
}

std::vector<OptionCase> OptionPaths() {
  std::vector<OptionCase> cases = OptionsAlone();
  const auto with = [](const char* name, float smoothing, float softcap) {
    return OptionCase{name, [smoothing, softcap](Problem& problem) {
                        problem.options.label_smoothing = smoothing;
                        problem.options.softcap = softcap;
                      }};
  };
  const OptionCase smoothing = with("label smoothing", 0.1f, 0.0f);
  const OptionCase both = with("label smoothing and softcap", 0.1f, 3.0f);
  cases.push_back(both);
  for (const OptionCase& option : OptionsAlone()) {
    const bool weighs = option.name.starts_with("class");
    const bool spreads = option.name.starts_with("entropy");
    if (weighs || spreads) cases.push_back(Both(option, smoothing));
    if (weighs || spreads) cases.push_back(Both(option, both));
    if (spreads) cases.push_back(Both(option, with("softcap", 0.0f, 3.0f)));
  }
  cases.push_back(Both(AllOptions(), with("but softcap", 0.1f, 0.0f)));
  cases.push_back(AllOptions());
  return cases;
}

std::vector<OptionCase> OptionCases(Beside beside) {
  std::vector<OptionCase> cases = OptionsAlone(beside);
  for (OptionCase& pair : Pairs(OptionsBeside(beside), [](size_t) { return size_t{0}; })) {
    cases.push_back(std::move(pair));
  }
  cases.push_back(AllOptions(beside));
  return cases;
}

std::vector<OptionProblem> OptionProblems(DataType type) {
  std::vector<OptionProblem> problems;
  const auto add = [&](const OptionCase& one, size_t number) {
    OptionProblem problem{one.name, PlainProblem(type, number)};
    one.set(problem.problem);
    problem.name += " of " + Describe(problem.problem.shape);
    problems.push_back(std::move(problem));
  };
  add({"nothing", [](Problem&) {}}, 0);
  for (const Option& option : Options()) {
    for (size_t turn = 0; turn < option.values.size(); ++turn) add(CaseOf(option, turn), 0);
  }
  size_t number = 0;
  for (const OptionCase& pair : Pairs(OptionsBeside(Beside::kNothing), [](size_t n) { return n; })) {
    add(pair, number++);
  }
  for (const size_t shape : {0, 2, 3}) add(AllOptions(), shape);
  return problems;
}

}  // namespace lossd::kernels::testing
