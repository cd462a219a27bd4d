// The step of kernels/optimizer.h on a CUDA device, in one pass over memory, and what else is done to whole
// gradients.
//
// All pointers are device memory, aligned to 16 bytes; those to the one row of a bias, which is fp32, may
// begin at any element where TallyGradient and ApplyOptimizer take them. Functions enqueue on `stream` and
// return at once; an error is the launch's. Sums are in an order that follows from the sizes alone.
#ifndef LOSSD_KERNELS_CUDA_OPTIMIZER_OPTIMIZER_H_
#define LOSSD_KERNELS_CUDA_OPTIMIZER_OPTIMIZER_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/optimizer.h"

namespace lossd::kernels::cuda {

// Rows of a matrix in memory. Padding, whatever it holds, is neither read into a result nor written.
struct PaddedRows {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;  // elements; a multiple of 4 unless there is one row
};

// dW as it is kept beside what label smoothing adds: values - t - C_v t_c.
struct GradientRows {
  const float* values = nullptr;  // null: zeros, and nothing else is looked at
  // [stride] each, or null.
  const float* uniform_smoothing = nullptr;
  const float* weighted_smoothing = nullptr;
  const float* class_weights = nullptr;  // C [rows]; with weighted_smoothing
};

struct StepTensor {
  PaddedRows shape;  // of everything here
  GradientRows gradient;
  DataType weight_type = DataType::kFloat32;
  void* weight = nullptr;
  float* master = nullptr;  // of 16-bit weights: what the step works on; null: the weight itself
  float* first_moment = nullptr;
  float* second_moment = nullptr;
  // One value, as LargestMagnitude of the new weight has it; of a bias as LargestShift has it.
  float* largest_weight = nullptr;
  bool is_bias = false;
};

// Memory for the functions below; they may share it within one stream.
int64_t TallyScratchBytes();

// The step, and what the scaled gradient is like: *tally and *tensor.largest_weight are written at its end.
Result ApplyOptimizer(const StepTensor& tensor, const OptimizerCoefficients& coefficients, void* scratch,
                      GradientTally* tally, cudaStream_t stream);

// The tally alone, in one reading of the gradient.
Result TallyGradient(const PaddedRows& shape, const GradientRows& gradient, float scale, void* scratch,
                     GradientTally* tally, cudaStream_t stream);

// Parts [first, end) of `of` equal ones of a matrix.
struct Parts {
  int32_t first = 0;
  int32_t end = 1;
  int32_t of = 1;
};
// Neighbouring elements, padding included.
struct ElementSpan {
  int64_t first = 0;
  int64_t count = 0;
};
// Small matrices have empty parts.
ElementSpan ElementsOf(const PaddedRows& shape, const Parts& parts);

// sum = sum + gradient, in these parts. Who does all of them in their order, in one stream and with the same
// scratch, has behind the last one the tally that TallyGradient would give of the sum. Padding stays as it
// is. It leaves much of the memory's bandwidth to what is copied at the same time.
Result AddAndTally(const PaddedRows& shape, const Parts& parts, const float* gradient, float scale,
                   float* sum, void* scratch, GradientTally* tally, cudaStream_t stream);

// What `gradient` says, with what label smoothing takes of it, in one matrix; `to` may be gradient.values,
// which is not null. Padding stays as it is.
Result GatherGradient(const PaddedRows& shape, const GradientRows& gradient, float* to, cudaStream_t stream);

// to = 0 + from, or to + from.
Result AddGradient(const float* from, int64_t count, WeightGradient store, float* to, cudaStream_t stream);

// weight = master, rounded to a 16-bit type.
Result NarrowMaster(const float* master, DataType weight_type, void* weight, int64_t count,
                    cudaStream_t stream);

// Loads every kernel that the functions above may launch for heads of this type.
Result LoadOptimizerKernels(DataType weight_type);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_OPTIMIZER_OPTIMIZER_H_
