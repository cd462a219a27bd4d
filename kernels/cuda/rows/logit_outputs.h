// What becomes of a product's sums where the logits themselves are wanted.
//
// All pointers are device memory. Functions enqueue on `stream` and return at once; an error is the launch's.
#ifndef LOSSD_KERNELS_CUDA_ROWS_LOGIT_OUTPUTS_H_
#define LOSSD_KERNELS_CUDA_ROWS_LOGIT_OUTPUTS_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cuda {

// Sums of the logits product [rows, stride], before bias, scale and softcap, in fp32.
struct LogitSums {
  int64_t rows = 0;
  int64_t vocab = 0;
  float* sums = nullptr;
  int64_t stride = 0;
  const float* bias = nullptr;  // [vocab]; null: none
  LossOptions options;          // logit_scale and softcap count
};

// In place: each row's sums become its logits, of `type`, at the beginning of the row's bytes.
Result FinishLogits(const LogitSums& logits, DataType type, cudaStream_t stream);

// kernels::LogitOutputs' of these rows, without changing the sums.
struct TopLogits {
  int32_t top_k = 0;             // 1 to kMostTopK and vocab
  int32_t* tokens = nullptr;     // [rows, top_k]
  float* logits = nullptr;       // [rows, top_k]
  float* log_sum_exp = nullptr;  // [rows]
};
Result FindTopLogits(const LogitSums& logits, const TopLogits& out, cudaStream_t stream);

// Loads every kernel that the functions above may launch.
Result LoadLogitOutputKernels();

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_LOGIT_OUTPUTS_H_
