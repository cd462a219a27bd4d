// How close steps with soft targets are to fp64, beside plain arithmetic in the same types.
#ifndef LOSSD_TESTS_CONFORMANCE_SOFT_TARGETS_CLOSENESS_H_
#define LOSSD_TESTS_CONFORMANCE_SOFT_TARGETS_CLOSENESS_H_

#include <functional>
#include <vector>

#include "kernels/data_type.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::engine::testing {

struct SoftStepOutcome {
  std::vector<float> losses;
  std::vector<float> dx;
  std::vector<float> dw;
};
using SoftStep = std::function<SoftStepOutcome(const kernels::testing::Problem&)>;

// Every divergence, alone and with other options, for heads of this type; prints the errors.
void ExpectSoftTargetsAreClose(kernels::DataType type, const SoftStep& step);

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_SOFT_TARGETS_CLOSENESS_H_
