#include "kernels/cpu/arithmetic.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "tests/conformance/device_under_test.h"

namespace lossd::engine::testing {

std::vector<DeviceUnderTest> DevicesUnderTest() {
  const auto gradient_error = [](kernels::DataType type) {
    using kernels::cpu::Arithmetic;
    // E and v x are rounded by up to 2^-9 each, which in gradients of one or two rows nothing averages out.
    return kernels::cpu::BestArithmetic(type) == Arithmetic::kLibraryBFloat16 ? 5e-3 : 1e-5;
  };
  return {{.name = "cpu",
           .create = &CreateCpuDevice,
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = [](kernels::DataType /*type*/) { return false; }}};
}

}  // namespace lossd::engine::testing
