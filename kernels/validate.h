// Checks of parameters: those of LinearCrossEntropyParams are shared by the CPU step and the reference.
#ifndef LOSSD_KERNELS_VALIDATE_H_
#define LOSSD_KERNELS_VALIDATE_H_

#include "kernels/linear_cross_entropy.h"
#include "kernels/logits.h"

namespace lossd::kernels {

// Sizes, input pointers and types, and options. Labels and values are the caller's to check.
Status ValidateInputs(const LinearCrossEntropyParams& params);

// ValidateInputs and what the CPU step writes to: outputs, returns, workspace and its alignment (not its
// size).
Status ValidateStep(const LinearCrossEntropyParams& params);

// The same of logits.
Status ValidateLogits(const LogitsParams& params);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_VALIDATE_H_
