// The optimizer that a server runs for a head: torch.optim's SGD, Adam and AdamW, by their names and
// defaults.
#ifndef LOSSD_OPTIMIZER_H_
#define LOSSD_OPTIMIZER_H_

#include <cstdint>
#include <optional>

namespace lossd {

enum class OptimizerKind { kNone, kSgd, kAdam, kAdamW };
inline constexpr OptimizerKind kOptimizerKinds[] = {OptimizerKind::kNone, OptimizerKind::kSgd,
                                                    OptimizerKind::kAdam, OptimizerKind::kAdamW};
const char* Name(OptimizerKind kind);  // "none", "sgd", "adam", "adamw"

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kNone;
  std::optional<double> weight_decay = {};  // unset: 0, of kAdamW 0.01
  // kSgd alone:
  double momentum = 0;  // 0: no memory is kept for it
  double dampening = 0;
  bool nesterov = false;
  // kAdam and kAdamW:
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  bool maximize = false;
};

// Statistics of a gradient times the factor that was asked for.
struct GradientStats {
  double norm = 0;         // Frobenius norm of dW
  double bias_norm = 0;    // of db; 0 of a head without a bias
  float largest = 0;       // largest finite magnitude of both
  int64_t non_finite = 0;  // elements of both that are NaN or infinite
  uint64_t window_tokens = 0;
};

struct StepOptions {
  double learning_rate = 0;  // finite, at least 0
  // Multiplies the gradient before anything else sees it: 1 / loss scale, the coefficient of a clipped norm,
  // the late factor of a mean, or their product. Finite.
  double gradient_scale = 1;
  // If an element of the gradient is NaN or infinite, weights and optimizer stay as they are; the window ends
  // all the same.
  bool skip_non_finite = false;
  // For schedules of more than the learning rate; unset: the head's.
  std::optional<double> weight_decay = {};
  std::optional<double> momentum = {};
  std::optional<double> beta1 = {};
  std::optional<double> beta2 = {};
  // The window that the step is to consume; unset: the one that is open. For a process that was restarted and
  // does not know whether its last step was taken: the same step again answers the same.
  std::optional<uint64_t> generation = {};
};

struct StepResult {
  uint64_t generation = 0;      // that of the next window
  uint64_t weight_version = 0;  // the new one, or if the step was skipped the old one
  int64_t step = 0;             // steps that the optimizer has taken, this one included unless it was skipped
  // Weights and optimizer are as they were: no token was in the window (as torch.optim leaves a parameter
  // alone that has no gradient), or the gradient was not finite and skip_non_finite was set.
  bool skipped = false;
  double norm = 0;  // of the scaled dW
  double bias_norm = 0;
  int64_t non_finite = 0;
  uint64_t window_tokens = 0;
};

}  // namespace lossd

#endif  // LOSSD_OPTIMIZER_H_
