#include "kernels/cpu/arithmetic.h"
#include "tests/conformance/device_under_test.h"

namespace lossd::engine::testing {

double CpuGradientError(kernels::DataType head_type) {
  using kernels::cpu::Arithmetic;
  // E and v x are rounded by up to 2^-9 each, which in gradients of one or two rows nothing averages out.
  return kernels::cpu::BestArithmetic(head_type) == Arithmetic::kLibraryBFloat16 ? 5e-3 : 1e-5;
}

}  // namespace lossd::engine::testing
