// Lists of kept tokens of the CUDA step, long beside short ones in tiles of any size, against the CPU.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/gpu/cuda_step_fixture.h"

namespace lossd::kernels::cuda_kept_test {
namespace {

using testing::CudaOptions;
using testing::CudaStepTest;
using testing::KeepTokens;
using testing::kIgnoreIndex;
using testing::Problem;
using testing::RandomProblem;
using testing::Reference;

constexpr int64_t kTokens = 31;
constexpr int64_t kVocab = 17000;
constexpr int64_t kHidden = 9;

class CudaKeptTokens : public CudaStepTest {
 protected:
  // Lists that are long on every path, on Hopper's alone, and on none.
  Problem Rows() const {
    Problem problem =
        RandomProblem({.shape = {kTokens, kVocab, kHidden}, .type = type(), .logit_deviation = 2.0});
    for (size_t r = 0; r < problem.labels.size(); r += 9) problem.labels[r] = kIgnoreIndex;
    KeepTokens(problem, {0.99, 0.002, 0.2, 0.99});
    return problem;
  }
};

TEST_P(CudaKeptTokens, SmallTilesOfLongAndShortListsAddUp) {
  const Problem problem = Rows();
  Reference reference = Expected(problem);
  CudaOptions options = Options();
  // Below eight rows Hopper's path gathers lists of any length.
  for (const int64_t tile_rows : {6, 8, 9, 13, 20, 0}) {
    SCOPED_TRACE(tile_rows);
    options.tile_rows = tile_rows;
    ExpectClose(Run(problem, options), reference);
  }
  options.tile_rows = 20;
  options.weight_gradient = WeightGradient::kAccumulate;
  options.initial_dw.assign(kVocab * kHidden, 0.25f);
  for (double& value : reference.dw) value += 0.25;
  ExpectClose(Run(problem, options), reference);
}

TEST_P(CudaKeptTokens, SmallRowsWithoutAShareAddNothingToDw) {
  const Problem problem = Rows();
  Problem expected = problem;
  CudaOptions options = Options();
  options.tile_rows = 20;
  options.shares.assign(kTokens, 1.0f);
  for (size_t r = 1; r < kTokens; r += 3) {
    options.shares[r] = 0.0f;
    expected.labels[r] = kIgnoreIndex;
  }
  Reference reference = Expected(problem);
  reference.dw = Expected(expected).dw;
  ExpectClose(Run(problem, options), reference);
}

TEST_P(CudaKeptTokens, SmallRowsThatOverflowLeaveTheOthersAlone) {
  Problem problem = Rows();
  Problem expected = problem;
  std::vector<float> hidden = problem.HiddenStates();
  for (const size_t r : {1, 3}) {  // a short and a long list
    hidden[r * kHidden] = std::numeric_limits<float>::infinity();
    expected.labels[r] = kIgnoreIndex;
  }
  problem.hidden_states = testing::Narrowed(problem.hidden_type, hidden);
  CudaOptions options = Options();
  options.tile_rows = 20;
  const testing::CudaOutcome outcome = Run(problem, options);
  const Reference reference = Expected(expected);
  EXPECT_LT(testing::RelativeError(outcome.dw, reference.dw), Tolerance());
  for (const size_t r : {1, 3}) {
    EXPECT_TRUE(std::isnan(outcome.losses[r]));
    EXPECT_TRUE(std::isnan(outcome.dx[r * kHidden]));
  }
  EXPECT_FALSE(std::isnan(outcome.losses[4]));
}

INSTANTIATE_TEST_SUITE_P(All, CudaKeptTokens, testing::EveryVariant(), testing::VariantName);

}  // namespace
}  // namespace lossd::kernels::cuda_kept_test
