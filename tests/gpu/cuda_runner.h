// Runs the CUDA step on a problem in host memory, with guard areas around every buffer.
#ifndef LOSSD_TESTS_GPU_CUDA_RUNNER_H_
#define LOSSD_TESTS_GPU_CUDA_RUNNER_H_

#include <optional>
#include <string>
#include <vector>

#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/sharded_step.h"
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
  std::vector<float> initial_db{};  // the same; of problems with a bias
  bool whole_rows = false;          // whether all is to be told that takes whole logits
  int32_t top_k = 0;                // with whole_rows
  bool ranks_wanted = true;         // the same: whether the labels' ranks are
  // The path of the problem's teacher; unset: the best that the device has, or kPortable where `path` is.
  std::optional<cuda::Path> teacher_path{};
  // For one rank's step: the problem's weights and bias are the shard's, its labels and class weights those
  // of the whole vocabulary. What another rank answers stays 0.
  const Shard* shard = nullptr;
  bool shared = false;       // whether copy engines move what they can
  bool skips_zeros = false;  // whether rows are left out that have no factor other than 0
  // Phase one of all rows goes before, and the step takes what it has held.
  bool held = false;
  bool changes_hidden_states = false;  // between the two phases
};

struct CudaOutcome {
  std::string error;    // empty, or what failed
  std::string touched;  // empty, or the buffer whose guard area was written to
  int64_t rows_redone = 0;
  // Ignored rows have 0 in all of these, -1 as tokens and ranks.
  std::vector<float> losses;
  std::vector<float> log_sum_exps;
  std::vector<float> z_losses;
  std::vector<float> log_probabilities;
  std::vector<float> divergences;  // with a teacher
  std::vector<float> entropies;    // this and what follows: empty without whole_rows
  std::vector<int32_t> predictions;
  std::vector<int32_t> ranks;
  std::vector<int32_t> top_tokens;           // [N, top_k]
  std::vector<float> top_log_probabilities;  // [N, top_k]
  std::vector<float> dx;                     // [N, H] widened; 0 for ignored rows
  std::vector<float> dw;                     // [V, H], with the term that the step keeps beside it
  std::vector<float> db;                     // [V]; empty without a bias
};

// Whether this machine's device takes this path for heads of this type.
bool CanRun(cuda::Path path, DataType weight_type);

CudaOutcome RunCudaStep(const Problem& problem, const CudaOptions& options = {});

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_GPU_CUDA_RUNNER_H_
