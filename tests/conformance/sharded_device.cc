// The same suite over heads that lie on several ranks, and where others than the leader hold the batches.
// What ranks add to a device depends neither on the type of a head nor, beyond one, on their number: the
// whole suite is run once for parts that differ in size, and once where others hold the batches. Other
// numbers and types are tried with options. Kernels over ranks: tests/unit/kernels/shards_test.cc.
#include <vector>

#include "kernels/data_type.h"
#include "tests/conformance/device_under_test.h"
#include "tests/conformance/rank_threads.h"

namespace lossd::engine::testing {
namespace {

using kernels::DataType;

DeviceUnderTest Ranks(const char* name, int32_t ranks, decltype(DeviceUnderTest::create) create) {
  return {.name = name,
          .create = create,
          .gradient_error = &CpuGradientError,
          .bits_depend_on_workspace = [](DataType /*type*/) { return false; },
          .ranks = ranks,
          .oracle = Oracle::kCpu,
          .types = {},
          .judged_closely = false};
}

template <int32_t ranks>
DeviceUnderTest Ranks(const char* name) {
  return Ranks(name, ranks, [](int64_t workspace_bytes) {
    return CreateRankThreads({.ranks = ranks, .workspace_bytes = workspace_bytes});
  });
}

DeviceUnderTest Held() {
  return Ranks("held3", 3, [](int64_t workspace_bytes) {
    return CreateRankThreads({.ranks = 3, .workspace_bytes = workspace_bytes, .holder = [](uint64_t batch) {
                                return static_cast<int32_t>(1 + batch % 2);
                              }});
  });
}

}  // namespace

std::vector<DeviceUnderTest> DevicesUnderTest() {
  // Three ranks have parts of different sizes, and the leader's is the smallest.
  std::vector<DeviceUnderTest> devices = {Ranks<1>("ranks1"), Ranks<2>("ranks2"), Ranks<3>("ranks3"),
                                          Ranks<4>("ranks4"), Held()};
  devices[0].types_of_options = {DataType::kFloat16};
  devices[1].types_of_options = {DataType::kBFloat16};
  devices[2].types = {DataType::kBFloat16};
  devices[2].types_of_options = {DataType::kFloat32, DataType::kFloat16};
  devices[3].types_of_options = {DataType::kFloat32};
  devices[4].types = {DataType::kFloat32};
  return devices;
}

}  // namespace lossd::engine::testing
