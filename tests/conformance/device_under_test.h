// What the conformance suite runs on. Each program that is made of it names its devices.
#ifndef LOSSD_TESTS_CONFORMANCE_DEVICE_UNDER_TEST_H_
#define LOSSD_TESTS_CONFORMANCE_DEVICE_UNDER_TEST_H_

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine::testing {

// The source of expected results. fp64 judges the CPU device, and the CPU device judges the others.
enum class Oracle {
  kReference,
  kCpu,           // a device whose logits have the same bits
  kCpuInFloat32,  // whatever the head's type
};

struct DeviceUnderTest {
  std::string name;  // of letters and digits
  // FAILED_PRECONDITION if this machine has none.
  absl::StatusOr<std::unique_ptr<Device>> (*create)(int64_t workspace_bytes);
  // How far dX and dW of a head of this type may be from fp64, relatively: 16-bit operands of the gradients'
  // products are that coarse, nothing else is. docs/numerics.md.
  double (*gradient_error)(kernels::DataType head_type);
  // Whether a library chooses how to compute a row by the size of the workspace (never by the batch).
  bool (*bits_depend_on_workspace)(kernels::DataType head_type);
  // Ranks that it spreads heads over: it takes no vocabulary with fewer entries, and what it says of memory
  // is of one rank.
  int32_t ranks = 1;
  Oracle oracle = Oracle::kReference;
  // Types of the heads that the whole suite is run with, and those for which options alone are tried.
  std::vector<kernels::DataType> types = {kernels::DataType::kFloat32, kernels::DataType::kBFloat16,
                                          kernels::DataType::kFloat16};
  std::vector<kernels::DataType> types_of_options = {};
  // Whether it has an arithmetic of its own, which closeness_test.cc compares with plain arithmetic.
  bool judged_closely = true;
};

inline std::ostream& operator<<(std::ostream& out, const DeviceUnderTest& device) {
  return out << device.name;
}

std::vector<DeviceUnderTest> DevicesUnderTest();

// gradient_error of the CPU.
double CpuGradientError(kernels::DataType head_type);

// Enough for every case of the suite, on every path of every device.
inline constexpr int64_t kWorkspaceBytes = int64_t{160} << 20;
inline constexpr int64_t kMaxChunkBytes = int64_t{4} << 20;
inline constexpr int64_t kMaxChunkTokens = 8192;

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_DEVICE_UNDER_TEST_H_
