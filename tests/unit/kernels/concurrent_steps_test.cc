// Steps of several threads at once. Under ThreadSanitizer this file runs alone of its folder: a step's own
// threads are OpenMP's, which no instrumented run has more than one of.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::concurrent_steps_test {
namespace {

using testing::Problem;
using testing::RandomProblem;
using testing::RunStep;
using testing::SameBits;
using testing::StepResult;

TEST(ConcurrentSteps, DifferentWorkspacesMayBeUsedAtOnce) {
  const Problem problem = RandomProblem({.shape = {70, 700, 100}, .logit_deviation = 3.0});
  const StepResult expected = RunStep(problem);
  std::vector<StepResult> results(4);
  std::vector<std::thread> threads;
  for (StepResult& result : results) threads.emplace_back([&] { result = RunStep(problem); });
  for (std::thread& thread : threads) thread.join();
  for (const StepResult& result : results) {
    EXPECT_TRUE(result.intact);
    EXPECT_TRUE(SameBits(result.losses, expected.losses));
    EXPECT_TRUE(SameBits(result.dx, expected.dx));
    EXPECT_TRUE(SameBits(result.dw, expected.dw));
  }
}

}  // namespace
}  // namespace lossd::kernels::concurrent_steps_test
