// One step of torch.optim's SGD, Adam or AdamW over one tensor, and what it tells of the gradient on its way.
// Rules and rounding points: docs/numerics.md, "The optimizer". Every device performs the same operations in
// the same order on each element, so weights and moments have the same bits on all of them.
#ifndef LOSSD_KERNELS_OPTIMIZER_H_
#define LOSSD_KERNELS_OPTIMIZER_H_

#include <cstdint>

#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels {

enum class OptimizerRule { kSgd, kAdam, kAdamW };

// By torch.optim's names. All finite; betas in [0, 1).
struct OptimizerArguments {
  OptimizerRule rule = OptimizerRule::kSgd;
  double learning_rate = 0;
  double gradient_scale = 1;  // multiplies the gradient before anything else sees it
  double weight_decay = 0;
  double momentum = 0;  // kSgd; 0: the buffer is left alone
  double dampening = 0;
  bool nesterov = false;
  double beta1 = 0.9;  // kAdam, kAdamW
  double beta2 = 0.999;
  double eps = 1e-8;
  bool maximize = false;
  int64_t step = 1;  // this one included
};

// What an element's arithmetic takes: computed in fp64, each rounded once.
struct OptimizerCoefficients {
  int moments = 0;          // 0: SGD, 1: SGD with momentum, 2: Adam and AdamW
  float scale = 1;          // of the gradient; its sign is turned to maximize
  float step_size = 0;      // what the update is subtracted with
  float added_decay = 0;    // SGD, Adam: times the weight, is added to the gradient
  float kept_weight = 1;    // AdamW: what the weight is multiplied by
  float momentum = 0;       // SGD
  float fresh = 1;          // SGD: the gradient's part in the buffer
  bool nesterov = false;    // SGD
  bool first_step = false;  // SGD: the buffer becomes the gradient
  float lerp_weight = 0;    // Adam: 1 - beta1
  float lerp_rest = 0;      // Adam: beta1
  bool lerp_from_end = false;
  float beta2 = 0;
  float beta2_rest = 0;
  float second_root = 1;  // the root of the second moment's bias correction
  float eps = 0;
};
OptimizerCoefficients CoefficientsOf(const OptimizerArguments& arguments);

// What a gradient times a factor adds up to.
struct GradientTally {
  double squares = 0;  // their sum, in fp64 in a fixed order; NaN or infinite if an element is
  float largest = 0;   // finite magnitude
  int64_t non_finite = 0;
};

// On the CPU, with its threads. The order of sums does not depend on how many there are.

struct OptimizerTensor {
  int64_t count = 0;
  const float* gradient = nullptr;  // null: zeros
  DataType weight_type = DataType::kFloat32;
  void* weight = nullptr;
  float* master = nullptr;         // of 16-bit weights: what the step works on; null: the weight itself
  float* first_moment = nullptr;   // SGD's momentum_buffer, Adam's exp_avg
  float* second_moment = nullptr;  // exp_avg_sq
};
GradientTally CpuApplyOptimizer(const OptimizerTensor& tensor, const OptimizerCoefficients& coefficients);

GradientTally CpuTallyGradient(const float* gradient, int64_t count, float scale);

// to = 0 + from, or to + from.
void CpuAddGradient(const float* from, int64_t count, WeightGradient store, float* to);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_OPTIMIZER_H_
