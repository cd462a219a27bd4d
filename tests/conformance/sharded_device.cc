// The same suite over heads that lie on several ranks, and where others than the leader hold the batches. How
// close results are is judged for one number of ranks, with parts that differ in size, and only that one is
// tried with every type: messages between ranks take most of the time, and what another number of them
// changes does not depend on the type. Batches of other holders have the same bits (held_chunks_test.cc).
#include <vector>

#include "kernels/data_type.h"
#include "tests/conformance/device_under_test.h"
#include "tests/conformance/rank_threads.h"

namespace lossd::engine::testing {
namespace {

using kernels::DataType;

// Three ranks have parts of different sizes, and the leader's is the smallest.
DeviceUnderTest Held() {
  return {.name = "held3",
          .create =
              [](int64_t workspace_bytes) {
                return CreateRankThreads(
                    {.ranks = 3, .workspace_bytes = workspace_bytes, .holder = [](uint64_t batch) {
                       return static_cast<int32_t>(1 + batch % 2);
                     }});
              },
          .gradient_error = &CpuGradientError,
          .bits_depend_on_workspace = [](DataType /*type*/) { return false; },
          .ranks = 3,
          .types = {DataType::kBFloat16},
          .judged_closely = false};
}

template <int32_t ranks>
DeviceUnderTest Ranks(const char* name, const std::vector<DataType>& types) {
  return {.name = name,
          .create =
              [](int64_t workspace_bytes) {
                return CreateRankThreads({.ranks = ranks, .workspace_bytes = workspace_bytes});
              },
          .gradient_error = &CpuGradientError,
          .bits_depend_on_workspace = [](DataType /*type*/) { return false; },
          .ranks = ranks,
          .types = types,
          .judged_closely = ranks == 3};
}

}  // namespace

std::vector<DeviceUnderTest> DevicesUnderTest() {
  return {Ranks<1>("ranks1", {DataType::kFloat16}), Ranks<2>("ranks2", {DataType::kBFloat16}),
          Ranks<3>("ranks3", {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}),
          Ranks<4>("ranks4", {DataType::kFloat32}), Held()};
}

}  // namespace lossd::engine::testing
