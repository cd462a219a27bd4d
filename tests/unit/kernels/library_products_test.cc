// The step over oneDNN's products. fp32 operands run everywhere; bf16 operands need a processor with a bf16
// matrix unit.
#include <gtest/gtest.h>

#include "kernels/cpu/gemm.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::cpu::library_products_test {
namespace {

using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::RunReference;
using testing::RunStep;
using testing::Shape;
using testing::StepResult;

void ExpectAgreement(const Problem& problem, Arithmetic arithmetic, int64_t tile_rows, double tolerance) {
  const Reference reference = RunReference(problem);
  const StepResult result = RunStep(problem, {.arithmetic = arithmetic, .tile_rows = tile_rows});
  ASSERT_EQ(result.status, Status::kOk);
  EXPECT_TRUE(result.intact);
  EXPECT_LT(RelativeError(result.losses, reference.losses), 1e-5);
  EXPECT_LT(RelativeError(result.dx, reference.dx), tolerance);
  EXPECT_LT(RelativeError(result.dw, reference.dw), tolerance);
}

TEST(LibraryProducts, Fp32AgreesWithReference) {
  for (const Shape& shape : {Shape{1, 1, 1}, Shape{31, 1000, 123}, Shape{1100, 300, 40}}) {
    const Problem problem = RandomProblem({.shape = shape, .logit_deviation = 2.0});
    ExpectAgreement(problem, Arithmetic::kLibraryFloat32, 0, 1e-5);
    ExpectAgreement(problem, Arithmetic::kLibraryFloat32, shape.tokens / 3 + 1, 1e-5);
  }
}

TEST(LibraryProducts, RowsOutOfRangeAreRedone) {
  Problem problem = RandomProblem({.shape = {60, 900, 40}});
  std::vector<float> weight = problem.Weight();
  for (int64_t h = 0; h < 40; ++h) weight[800 * 40 + h] = 60.0f;
  problem.weight = testing::Narrowed(DataType::kFloat32, weight);
  const StepResult result = RunStep(problem, {.arithmetic = Arithmetic::kLibraryFloat32});
  EXPECT_GT(result.stats.rows_redone, 0);
  ExpectAgreement(problem, Arithmetic::kLibraryFloat32, 0, 1e-5);
}

TEST(LibraryProducts, TakeOnlyWeightsOfTheirOwnType) {
  const Problem problem = RandomProblem({.shape = {2, 30, 8}, .type = DataType::kBFloat16});
  EXPECT_EQ(RunStep(problem, {.arithmetic = Arithmetic::kLibraryFloat32}).status, Status::kUnsupported);
}

TEST(LibraryProducts, BFloat16AgreesWithReferenceOrSaysItCannot) {
  const Problem problem =
      RandomProblem({.shape = {70, 1000, 123}, .type = DataType::kBFloat16, .logit_deviation = 2.0});
  if (HasFastBFloat16()) {
    ExpectAgreement(problem, Arithmetic::kLibraryBFloat16, 0, 5e-3);
    return;
  }
  const Status status = RunStep(problem, {.arithmetic = Arithmetic::kLibraryBFloat16}).status;
  EXPECT_TRUE(status == Status::kInternal || status == Status::kOk) << StatusName(status);
}

}  // namespace
}  // namespace lossd::kernels::cpu::library_products_test
