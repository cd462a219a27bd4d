#include "server/engine/device/cpu/cpu_backend.h"
#include "tests/conformance/device_under_test.h"

namespace lossd::engine::testing {

std::vector<DeviceUnderTest> DevicesUnderTest() {
  return {{.name = "cpu",
           .create = &CreateCpuDevice,
           .gradient_error = &CpuGradientError,
           .bits_depend_on_workspace = [](kernels::DataType /*type*/) { return false; }}};
}

}  // namespace lossd::engine::testing
