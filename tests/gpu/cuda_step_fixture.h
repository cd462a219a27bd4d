// Tests of the CUDA step that are run on both paths and for all types, and compare it with the CPU's step.
// Each is within a bound of fp64, so that they are within the sum of each other.
#ifndef LOSSD_TESTS_GPU_CUDA_STEP_FIXTURE_H_
#define LOSSD_TESTS_GPU_CUDA_STEP_FIXTURE_H_

#include <gtest/gtest.h>

#include <string>

#include "tests/gpu/cuda_runner.h"
#include "tests/unit/kernels/cpu_results.h"

namespace lossd::kernels::testing {

struct Variant {
  cuda::Path path;
  DataType type;
};

inline std::string VariantName(const ::testing::TestParamInfo<Variant>& test) {
  const bool hopper = test.param.path == cuda::Path::kHopper;
  return std::string(hopper ? "Hopper_" : "Portable_") + Name(test.param.type);
}

inline auto EveryVariant() {
  return ::testing::Values(
      Variant{cuda::Path::kHopper, DataType::kBFloat16}, Variant{cuda::Path::kHopper, DataType::kFloat16},
      Variant{cuda::Path::kPortable, DataType::kBFloat16}, Variant{cuda::Path::kPortable, DataType::kFloat16},
      Variant{cuda::Path::kPortable, DataType::kFloat32});
}

class CudaStepTest : public ::testing::TestWithParam<Variant> {
 public:
  static constexpr double kRowTolerance = 2e-5;

 protected:
  void SetUp() override {
    ASSERT_TRUE(CanRun(GetParam().path, GetParam().type)) << "this test needs a GPU that takes the path";
  }
  static DataType type() { return GetParam().type; }
  static CudaOptions Options() {
    CudaOptions options;
    options.path = GetParam().path;
    return options;
  }
  static Reference Expected(const Problem& problem) { return CpuResultsInFloat32(problem); }
  // 16-bit operands of the gradients' products are that coarse; nothing else is.
  static double Tolerance() {
    return kFloat32Error + (type() == DataType::kFloat32    ? 1e-5
                            : type() == DataType::kBFloat16 ? 4e-3
                                                            : 1e-3);
  }
  // Runs, and checks what holds for every run.
  static CudaOutcome Run(const Problem& problem, const CudaOptions& options) {
    CudaOutcome outcome = RunCudaStep(problem, options);
    EXPECT_EQ(outcome.error, "");
    EXPECT_EQ(outcome.touched, "") << "its guard area was written to";
    return outcome;
  }
  // Gradients of the entropy are made of exponentials in 16 bits, where nothing forbids it
  // (docs/numerics.md).
  static double ToleranceOf(const Problem& problem) {
    const bool spread = GetParam().path == cuda::Path::kHopper && !problem.entropy_gradients.empty();
    return spread ? 4 * Tolerance() : Tolerance();
  }
  static void ExpectClose(const CudaOutcome& outcome, const Reference& reference,
                          double tolerance = Tolerance()) {
    EXPECT_LT(RelativeError(outcome.losses, reference.losses), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.log_sum_exps, reference.log_sum_exp), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.z_losses, reference.z_loss), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.log_probabilities, reference.log_probability), kRowTolerance);
    EXPECT_LT(RelativeError(outcome.dx, reference.dx), tolerance);
    ExpectWeightGradientsClose(outcome, reference, tolerance);
  }
  // dW, and with a bias db, which terms cancel in as they do in no column of dW.
  static void ExpectWeightGradientsClose(const CudaOutcome& outcome, const Reference& reference,
                                         double tolerance = Tolerance()) {
    EXPECT_LT(RelativeError(outcome.dw, reference.dw), tolerance);
    if (outcome.db.empty()) return;
    EXPECT_LT(RelativeError(outcome.db, reference.db), 3 * tolerance) << "db";
  }
};

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_GPU_CUDA_STEP_FIXTURE_H_
