// Whatever a client sends, it gets the right status with a message that names the field and both values, a
// metric counts it, nothing of it reaches dW, and the server goes on.
#include "tests/integration/server/bad_input.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace lossd::testing::bad_input_test {
namespace {

using engine::RejectReason;
using ::testing::HasSubstr;

std::vector<Case> AllCases() {
  std::vector<Case> all;
  for (const auto& cases : {ContentCases(), StreamCases(), CallCases(), CopyCases(), ParkingCases(),
                            StepCases(), LogitsCases(), ClientCases()}) {
    all.insert(all.end(), cases.begin(), cases.end());
  }
  return all;
}

class BadInput : public ::testing::TestWithParam<Case> {};

TEST_P(BadInput, GetsAClearErrorAndNothingIsLost) {
  const Case& test_case = GetParam();
  Environment environment;
  const WindowContent before = PeekWindow(environment.stubs(), "h");
  ASSERT_EQ(before.tokens, 16U);
  const uint64_t counted =
      test_case.reason.has_value() ? environment.server().rejected(*test_case.reason) : 0;

  const Outcome outcome = test_case.act(environment);

  EXPECT_EQ(outcome.code, test_case.code) << outcome.message;
  for (const std::string& part : test_case.message) EXPECT_THAT(outcome.message, HasSubstr(part));
  if (!test_case.field.empty()) {
    EXPECT_EQ(outcome.field, test_case.field);
  }
  if (test_case.reason.has_value()) {
    EXPECT_EQ(environment.server().rejected(*test_case.reason), counted + 1);
  }
  const bool positional =
      test_case.code == grpc::StatusCode::ABORTED &&
      (test_case.reason == RejectReason::kGeneration || test_case.reason == RejectReason::kIncarnation);
  if (positional || test_case.reason == RejectReason::kGap) {
    ASSERT_TRUE(outcome.position.has_value());
    EXPECT_EQ(outcome.position->incarnation(), environment.session().incarnation());
  }
  EXPECT_EQ(PeekWindow(environment.stubs(), "h"), before) << "dW changed";

  environment.Restart();
  const std::optional<v1::ChunkResult> good = environment.Compute(environment.Good());
  ASSERT_TRUE(good.has_value()) << "the server no longer computes";
  EXPECT_EQ(good->disposition(), v1::DISPOSITION_ACCUMULATED);
}

INSTANTIATE_TEST_SUITE_P(Table, BadInput, ::testing::ValuesIn(AllCases()),
                         [](const ::testing::TestParamInfo<Case>& param) { return param.param.name; });

}  // namespace
}  // namespace lossd::testing::bad_input_test
