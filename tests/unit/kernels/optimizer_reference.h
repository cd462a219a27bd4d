// torch.optim's SGD, Adam and AdamW in fp64, written as its documentation has them: the oracle of every
// device.
#ifndef LOSSD_TESTS_UNIT_KERNELS_OPTIMIZER_REFERENCE_H_
#define LOSSD_TESTS_UNIT_KERNELS_OPTIMIZER_REFERENCE_H_

#include <string>
#include <vector>

#include "kernels/optimizer.h"

namespace lossd::kernels::testing {

struct ReferenceTensor {
  std::vector<double> weight;
  std::vector<double> first;
  std::vector<double> second;
};

void ReferenceStep(const OptimizerArguments& arguments, const std::vector<float>& gradient,
                   ReferenceTensor* tensor);

struct NamedOptimizer {
  std::string name;
  OptimizerArguments arguments;
};
// Every argument away from its default somewhere.
std::vector<NamedOptimizer> OptimizersUnderTest();

// Normal numbers of this deviation.
std::vector<float> NormalFloats(int64_t count, double deviation, uint64_t seed);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_UNIT_KERNELS_OPTIMIZER_REFERENCE_H_
