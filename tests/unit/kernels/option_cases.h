// The options of a loss for the tests of every device: each alone, in pairs, all together. No test has a
// table of its own.
#ifndef LOSSD_TESTS_UNIT_KERNELS_OPTION_CASES_H_
#define LOSSD_TESTS_UNIT_KERNELS_OPTION_CASES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::testing {

// What a batch has beside its options. Label smoothing does not go with lists of tokens.
enum class Beside { kNothing, kLists };

struct OptionCase {
  std::string name;
  std::function<void(Problem&)> set;  // of a problem without options
};

// No option, and each by itself, at a usual value.
std::vector<OptionCase> OptionsAlone(Beside beside = Beside::kNothing);
OptionCase AllOptions(Beside beside = Beside::kNothing);
// The above and every two options.
std::vector<OptionCase> OptionCases(Beside beside = Beside::kNothing);
// OptionsAlone, what a device computes in another way together than alone, and all but softcap.
std::vector<OptionCase> OptionPaths();

struct OptionProblem {
  std::string name;
  Problem problem;
};

// Problems of several shapes, spreads of logits and numbers of ignored rows: each option at each of its
// values, ordinary and extreme, and every two options with values that take turns. No vocabulary has less
// than four entries.
std::vector<OptionProblem> OptionProblems(DataType type);

// As many values between these two, in no order; every seventh is 0.
std::vector<float> Spread(int64_t count, float low, float high);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_UNIT_KERNELS_OPTION_CASES_H_
