// What the CPU's step does beside its results, which tests/conformance holds to fp64 in every shape and type.
#include "kernels/linear_cross_entropy.h"

#include <gtest/gtest.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/workspace.h"
#include "tests/unit/kernels/problem.h"
#include "tests/unit/kernels/soft_problems.h"

namespace lossd::kernels::linear_cross_entropy_test {
namespace {

using testing::Describe;
using testing::GuardedBytes;
using testing::Problem;
using testing::RandomProblem;
using testing::Reference;
using testing::RelativeError;
using testing::RunReference;
using testing::RunStep;
using testing::SameBits;
using testing::Shape;
using testing::StepResult;

constexpr int64_t kIgnored = -100;

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};

TEST(CpuLinearCrossEntropy, AgreesWithReferenceInManySmallTiles) {
  Problem problem = RandomProblem({.shape = {100, 600, 70}, .logit_deviation = 2.0});
  problem.labels[50] = kIgnored;
  const Reference reference = RunReference(problem);
  for (const int64_t tile_rows : {1, 7, 48, 99}) {
    SCOPED_TRACE(tile_rows);
    const StepResult result = RunStep(problem, {.tile_rows = tile_rows});
    ASSERT_EQ(result.status, Status::kOk);
    EXPECT_TRUE(result.intact);
    EXPECT_EQ(result.stats.valid_tokens, 99);
    EXPECT_EQ(result.stats.rows_redone, 0);
    EXPECT_LT(RelativeError(result.losses, reference.losses), 1e-5);
    EXPECT_LT(RelativeError(result.dx, reference.dx), 1e-5);
    EXPECT_LT(RelativeError(result.dw, reference.dw), 1e-5);
  }
}

TEST(CpuLinearCrossEntropy, AccumulateAddsAndNoneLeavesDwAlone) {
  const Problem problem = RandomProblem({.shape = {40, 300, 70}});
  const StepResult fresh = RunStep(problem);
  std::vector<float> before(fresh.dw.size());
  for (size_t i = 0; i < before.size(); ++i) before[i] = 0.01f * static_cast<float>(i % 7);

  const StepResult untouched =
      RunStep(problem, {.weight_gradient = WeightGradient::kNone, .initial_dw = before});
  EXPECT_TRUE(SameBits(untouched.dw, before));
  EXPECT_TRUE(SameBits(untouched.losses, fresh.losses));
  EXPECT_TRUE(SameBits(untouched.dx, fresh.dx));

  const StepResult added =
      RunStep(problem, {.weight_gradient = WeightGradient::kAccumulate, .initial_dw = before});
  std::vector<double> expected(before.begin(), before.end());
  for (size_t i = 0; i < before.size(); ++i) expected[i] += fresh.dw[i];
  EXPECT_LT(RelativeError(added.dw, expected), 1e-6);
}

TEST(CpuLinearCrossEntropy, OverwriteNeverReadsTheOldDw) {
  const Problem problem = RandomProblem({.shape = {60, 300, 70}});
  for (const int64_t tile_rows : {60, 13}) {
    const std::vector<float> zeros(static_cast<size_t>(300 * 70), 0.0f);
    const StepResult poisoned = RunStep(problem, {.tile_rows = tile_rows});  // dW starts as NaN
    const StepResult clean = RunStep(problem, {.tile_rows = tile_rows, .initial_dw = zeros});
    EXPECT_EQ(CountNonFinite(DataType::kFloat32, poisoned.dw.data(), 300 * 70), 0);
    EXPECT_TRUE(SameBits(poisoned.dw, clean.dw));
  }
}

TEST(CpuLinearCrossEntropy, RowsDoNotDependOnTheRowsBesideThem) {
  // Every prefix and a few single rows from the middle of one batch, which lands them at other places of
  // other tiles.
  const std::pair<DataType, int64_t> cases[] = {{DataType::kFloat32, 300},
                                                {DataType::kBFloat16, 300},
                                                {DataType::kBFloat16, 4100},
                                                {DataType::kFloat16, 300}};
  for (const auto& one : cases) {
    const DataType type = one.first;
    const int64_t hidden = one.second;
    const Problem whole = RandomProblem({.shape = {1024, 700, hidden}, .type = type, .logit_deviation = 3.0});
    const StepResult expected = RunStep(whole);
    const auto expect_same = [&](int64_t first, int64_t count, int64_t tile_rows) {
      SCOPED_TRACE("rows " + std::to_string(first) + " + " + std::to_string(count));
      const StepResult result = RunStep(testing::PartOf(whole, first, count), {.tile_rows = tile_rows});
      EXPECT_TRUE(SameBits(result.losses.data(), &expected.losses[first], count));
      EXPECT_TRUE(SameBits(result.log_sum_exp.data(), &expected.log_sum_exp[first], count));
      EXPECT_TRUE(SameBits(result.dx.data(), &expected.dx[first * hidden], count * hidden));
    };
    for (const int64_t count : {1, 2, 3, 7, 8, 16, 31, 64, 100, 255, 512, 1000}) {
      expect_same(0, count, 0);
      expect_same(1024 - count, count, 0);
    }
    for (const int64_t row : {1, 5, 6, 11, 12, 500, 777}) expect_same(row, 1, 0);
    expect_same(0, 1024, 100);
  }
}

TEST(CpuLinearCrossEntropy, SameBitsOnAnyNumberOfThreads) {
#ifdef _OPENMP
  const int threads = omp_get_max_threads();
#endif
  for (const Shape& shape : {Shape{1, 700, 300}, Shape{70, 700, 300}, Shape{600, 3000, 40}}) {
    SCOPED_TRACE(Describe(shape));
    const Problem problem = RandomProblem({.shape = shape, .logit_deviation = 3.0});
    const StepResult expected = RunStep(problem);
    for (const int count : {1, 2, 3, 8}) {
#ifdef _OPENMP
      omp_set_num_threads(count);
#endif
      const StepResult result = RunStep(problem);
      EXPECT_TRUE(SameBits(result.losses, expected.losses)) << count;
      EXPECT_TRUE(SameBits(result.dx, expected.dx)) << count;
      EXPECT_TRUE(SameBits(result.dw, expected.dw)) << count;
    }
  }
#ifdef _OPENMP
  omp_set_num_threads(threads);
#endif
}

TEST(CpuLinearCrossEntropy, ABatchOfIgnoredRowsOnly) {
  Problem problem = RandomProblem({.shape = {9, 300, 70}});
  problem.labels.assign(9, kIgnored);
  const std::vector<float> before(static_cast<size_t>(300 * 70), 1.5f);
  const std::vector<float> zeros(before.size(), 0.0f);

  const StepResult added =
      RunStep(problem, {.weight_gradient = WeightGradient::kAccumulate, .initial_dw = before});
  EXPECT_EQ(added.status, Status::kOk);
  EXPECT_EQ(added.stats.valid_tokens, 0);
  EXPECT_TRUE(SameBits(added.dw, before));
  EXPECT_TRUE(SameBits(added.dx.data(), zeros.data(), 9 * 70));
  EXPECT_TRUE(SameBits(added.losses.data(), zeros.data(), 9));

  EXPECT_TRUE(SameBits(RunStep(problem).dw, zeros));  // an overwritten window begins at zero
}

struct CallbackRecord {
  const float* losses;
  const float* dx;
  const float* dw;
  int64_t calls = 0;
  Shape shape;
  std::vector<float> losses_seen{};
  std::vector<float> dx_seen{};
  std::vector<float> dw_seen{};
};

void Record(void* context) {
  auto& record = *static_cast<CallbackRecord*>(context);
  const auto [tokens, vocab, hidden] = record.shape;
  ++record.calls;
  record.losses_seen.assign(record.losses, record.losses + tokens);
  record.dx_seen.assign(record.dx, record.dx + tokens * hidden);
  record.dw_seen.assign(record.dw, record.dw + vocab * hidden);
}

TEST(CpuLinearCrossEntropy, CallsBackOnceWhenDxIsFinalAndBeforeTheLastProduct) {
  for (const int64_t tile_rows : {40, 15}) {
    SCOPED_TRACE(tile_rows);
    const Shape shape{40, 300, 20};
    Problem problem = RandomProblem({.shape = shape});
    problem.labels[39] = kIgnored;  // a trailing ignored row must not lead to a second call
    std::vector<float> losses(40);
    std::vector<float> dx(40 * 20);
    std::vector<float> dw(300 * 20, 0.25f);
    const std::vector<float> dw_before = dw;
    GuardedBytes workspace(WorkspaceBytes(tile_rows, 300, 20, DataType::kFloat32), 64);
    CallbackRecord record{.losses = losses.data(), .dx = dx.data(), .dw = dw.data(), .shape = shape};
    LinearCrossEntropyParams params = problem.Params();
    params.losses = losses.data();
    params.dx = dx.data();
    params.weight_gradient = WeightGradient::kAccumulate;
    params.dw = dw.data();
    params.workspace = workspace.data();
    params.workspace_bytes = workspace.size();
    params.on_input_gradients = &Record;
    params.on_input_gradients_context = &record;
    LinearCrossEntropyStats stats;
    ASSERT_EQ(CpuLinearCrossEntropy(params, &stats), Status::kOk);
    EXPECT_EQ(record.calls, 1);
    EXPECT_TRUE(SameBits(record.losses_seen, losses));
    EXPECT_TRUE(SameBits(record.dx_seen, dx));
    EXPECT_FALSE(SameBits(record.dw_seen, dw));
    if (tile_rows == 40) {
      EXPECT_TRUE(SameBits(record.dw_seen, dw_before));
    }
  }
}

TEST(CpuLinearCrossEntropy, CallsBackOnceWithoutValidRowsAndNeverOnFailure) {
  Problem problem = RandomProblem({.shape = {4, 30, 8}});
  problem.labels.assign(4, kIgnored);
  int calls = 0;
  std::vector<float> losses(4);
  GuardedBytes workspace(WorkspaceBytes(1, 30, 8, DataType::kFloat32), 64);
  LinearCrossEntropyParams params = problem.Params();
  params.losses = losses.data();
  params.workspace = workspace.data();
  params.workspace_bytes = workspace.size();
  params.on_input_gradients = [](void* context) { ++*static_cast<int*>(context); };
  params.on_input_gradients_context = &calls;
  EXPECT_EQ(CpuLinearCrossEntropy(params, nullptr), Status::kOk);
  EXPECT_EQ(calls, 1);
  params.workspace_bytes -= 1;
  EXPECT_EQ(CpuLinearCrossEntropy(params, nullptr), Status::kWorkspaceTooSmall);
  EXPECT_EQ(calls, 1);
}

TEST(CpuLinearCrossEntropy, RejectsWhatItCannotWorkWith) {
  const Problem problem = RandomProblem({.shape = {4, 30, 8}});
  std::vector<float> losses(4);
  GuardedBytes workspace(WorkspaceBytes(4, 30, 8, DataType::kFloat32), 64);
  LinearCrossEntropyParams good = problem.Params();
  good.losses = losses.data();
  good.workspace = workspace.data();
  good.workspace_bytes = workspace.size();
  ASSERT_EQ(CpuLinearCrossEntropy(good, nullptr), Status::kOk);
  using Change = void (*)(LinearCrossEntropyParams&);
  const Change changes[] = {
      [](auto& p) { p.tokens = 0; },
      [](auto& p) { p.vocab = 0; },
      [](auto& p) { p.hidden = -1; },
      [](auto& p) { p.vocab = int64_t{1} << 40, p.hidden = int64_t{1} << 40; },
      [](auto& p) { p.weight_type = static_cast<DataType>(7); },
      [](auto& p) { p.weight = nullptr; },
      [](auto& p) { p.hidden_states = nullptr; },
      [](auto& p) { p.labels = nullptr; },
      [](auto& p) { p.losses = nullptr; },
      [](auto& p) { p.weight_gradient = WeightGradient::kAccumulate; },
      [](auto& p) { p.workspace = nullptr; },
      [](auto& p) { p.workspace = static_cast<char*>(p.workspace) + 4; },
  };
  for (size_t i = 0; i < std::size(changes); ++i) {
    LinearCrossEntropyParams bad = good;
    changes[i](bad);
    EXPECT_EQ(CpuLinearCrossEntropy(bad, nullptr), Status::kInvalidArgument) << i;
  }
}

TEST(Workspace, IsMonotonicAndRowsWithinIsItsInverse) {
  for (const Shape& shape : {Shape{1, 1, 1}, Shape{1, 50257, 123}, Shape{1, 131072, 4096}}) {
    for (const DataType type : kTypes) {
      int64_t last = 0;
      for (int64_t rows = 1; rows < 300; ++rows) {
        const int64_t bytes = WorkspaceBytes(rows, shape.vocab, shape.hidden, type);
        EXPECT_GE(bytes, last);
        last = bytes;
        const int64_t fits = RowsWithin(bytes, shape.vocab, shape.hidden, type);
        EXPECT_GE(fits, rows);
        EXPECT_LE(WorkspaceBytes(fits, shape.vocab, shape.hidden, type), bytes);
        EXPECT_LT(RowsWithin(bytes - 1, shape.vocab, shape.hidden, type), fits);
      }
      EXPECT_EQ(RowsWithin(0, shape.vocab, shape.hidden, type), 0);
      EXPECT_EQ(
          RowsWithin(WorkspaceBytes(1, shape.vocab, shape.hidden, type) - 1, shape.vocab, shape.hidden, type),
          0);
    }
  }
}

TEST(Workspace, OneRowTakesTheScratchOfOneThreadOnAnyNumberOfProcessors) {
  for (const DataType type : kTypes) {
    const int64_t floats = cpu::BestArithmetic(type) == cpu::Arithmetic::kSimd
                               ? cpu::kBlock * (cpu::kBlock + cpu::kColumnAlignment)
                               : cpu::kLibraryBlock * cpu::kLibraryRows;
    EXPECT_LT(WorkspaceBytes(1, 1, 1, type), floats * 6);
  }
}

TEST(Workspace, SizesBeyondMemorySaturateInsteadOfWrapping) {
  const int64_t huge = int64_t{1} << 55;
  EXPECT_EQ(WorkspaceBytes(huge, huge, huge, DataType::kFloat32), INT64_MAX);
  EXPECT_EQ(WorkspaceBytes(1, INT64_MAX, 1, DataType::kFloat32), INT64_MAX);
  EXPECT_EQ(RowsWithin(int64_t{1} << 30, huge, huge, DataType::kFloat32), 0);
  EXPECT_GT(WorkspaceBytes(int64_t{1} << 20, 262144, 4096, DataType::kFloat32), int64_t{1} << 40);
}

}  // namespace
}  // namespace lossd::kernels::linear_cross_entropy_test
