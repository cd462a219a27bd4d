// AdamW on a flat array of parameters: the update of torch.optim.AdamW.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_ADAM_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_ADAM_H_

#include <cstdint>
#include <span>
#include <vector>

#include "client/examples/train_lm/thread_pool.h"

namespace lossd::train_lm {

struct AdamOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
};

// Between two steps.
struct AdamState {
  int64_t steps = 0;
  std::vector<float> first;
  std::vector<float> second;
};

class Adam {
 public:
  Adam(int64_t parameters, const AdamOptions& options);

  // Both spans have the size given at construction.
  void Step(double learning_rate, std::span<const float> gradient, std::span<float> parameters,
            ThreadPool* pool);

  AdamState state() const { return {steps_, first_, second_}; }
  // `state` has as many parameters.
  void Restore(const AdamState& state);

 private:
  AdamOptions options_;
  int64_t steps_ = 0;
  std::vector<float> first_;
  std::vector<float> second_;
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_ADAM_H_
