#include <gtest/gtest.h>

#include "kernels/data_type.h"
#include "tests/conformance/soft_targets_closeness.h"

namespace lossd::engine::testing::cpu_soft_targets_closeness_test {
namespace {

using kernels::DataType;

class SoftTargetsCloseness : public ::testing::TestWithParam<DataType> {};

TEST_P(SoftTargetsCloseness, IsThatOfPlainArithmeticOrBetter) {
  ExpectSoftTargetsAreClose(GetParam(), [](const kernels::testing::Problem& problem) {
    kernels::testing::StepResult result = kernels::testing::RunStep(problem);
    return SoftStepOutcome{result.losses, result.dx, result.dw};
  });
}

INSTANTIATE_TEST_SUITE_P(All, SoftTargetsCloseness,
                         ::testing::Values(DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16),
                         [](const auto& test) { return kernels::Name(test.param); });

}  // namespace
}  // namespace lossd::engine::testing::cpu_soft_targets_closeness_test
