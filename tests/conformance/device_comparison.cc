#include "tests/conformance/comparison.h"
#include "tests/conformance/head_under_test.h"

namespace lossd::engine::testing {

void Comparison::Add(Device* device, const Problem& problem) {
  HeadUnderTest head(device, problem);
  const ChunkOutput output = head.Run(problem);
  Add(problem, output.losses, output.dx, head.Gradient(), head.BiasGradient());
}

}  // namespace lossd::engine::testing
