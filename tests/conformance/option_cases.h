// Problems with options: each alone, and in seeded random combinations.
#ifndef LOSSD_TESTS_CONFORMANCE_OPTION_CASES_H_
#define LOSSD_TESTS_CONFORMANCE_OPTION_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/unit/kernels/problem.h"

namespace lossd::engine::testing {

struct OptionCase {
  std::string name;
  kernels::testing::Problem problem;
};

// Each option by itself, at several values, on one set of rows some of which are ignored.
std::vector<OptionCase> OptionsAlone(kernels::DataType type);

// Any of them together, of any shape, labels and spread of logits. The same for the same seed.
OptionCase RandomOptions(kernels::DataType type, uint64_t seed);

// The options of a problem as one line.
std::string DescribeOptions(const kernels::testing::Problem& problem);

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_OPTION_CASES_H_
