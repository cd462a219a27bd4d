// Runs the CUDA step on a problem in host memory, with guard areas around every buffer.
#ifndef LOSSD_TESTS_GPU_CUDA_RUNNER_H_
#define LOSSD_TESTS_GPU_CUDA_RUNNER_H_

#include <string>
#include <vector>

#include "kernels/cuda/linear_cross_entropy.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::testing {

inline constexpr int64_t kIgnoreIndex = -100;

struct CudaOptions {
  cuda::Path path = cuda::Path::kHopper;
  int64_t tile_rows = 0;  // 0: as many as the problem has
  WeightGradient weight_gradient = WeightGradient::kOverwrite;
  DataType dx_type = DataType::kFloat32;
  bool dx_wanted = true;
  int32_t exponent_bias = 0;
  std::vector<float> shares{};      // of each token; empty: all 1
  std::vector<float> initial_dw{};  // empty: NaN everywhere
};

struct CudaOutcome {
  std::string error;    // empty, or what failed
  std::string touched;  // empty, or the buffer whose guard area was written to
  int64_t rows_redone = 0;
  std::vector<float> losses;        // 0 for ignored rows
  std::vector<float> log_sum_exps;  // 0 for ignored rows
  std::vector<float> dx;            // [N, H] widened; 0 for ignored rows
  std::vector<float> dw;            // [V, H]
};

// Whether this machine's device takes this path for heads of this type.
bool CanRun(cuda::Path path, DataType weight_type);

CudaOutcome RunCudaStep(const Problem& problem, const CudaOptions& options = {});

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_GPU_CUDA_RUNNER_H_
