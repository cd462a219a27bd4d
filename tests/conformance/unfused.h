// Plain arithmetic as PyTorch does it, which the fused step is judged against: logits in the head's type with
// fp32 accumulation, the bias among them, softmax and all options of the loss in fp32, the gradient of the
// logits rounded to the head's type, two more products.
#ifndef LOSSD_TESTS_CONFORMANCE_UNFUSED_H_
#define LOSSD_TESTS_CONFORMANCE_UNFUSED_H_

#include <vector>

#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::testing {

struct UnfusedResult {
  std::vector<float> losses;
  std::vector<float> dx;  // before it is rounded to the type asked for
  std::vector<float> dw;
  std::vector<float> db;  // [V]
};

// No row may be ignored.
UnfusedResult RunUnfused(const Problem& problem);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_CONFORMANCE_UNFUSED_H_
