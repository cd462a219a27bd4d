// A CPU whose losses and gradients can be foretold, to the bit and whatever the order of sums: "dW"[label] +=
// gradient_scale * x, "db" half of each row's first element; "loss": label + x[0], times the token's weight;
// "dX": 2 x. What is returned of each token: the log-sum-exp is its upstream gradient, the k-th best token
// label + k, a z-loss 1, a divergence half of its label, each other value its label. The statistics of a
// gradient are always the same. Weights, optimizers and logits are the CPU's.
#ifndef LOSSD_TESTS_SUPPORT_WHOLE_NUMBER_DEVICE_H_
#define LOSSD_TESTS_SUPPORT_WHOLE_NUMBER_DEVICE_H_

#include <memory>

#include "server/engine/device/head_backend.h"

namespace lossd::testing {

std::unique_ptr<engine::Device> MakeWholeNumberDevice();

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_WHOLE_NUMBER_DEVICE_H_
