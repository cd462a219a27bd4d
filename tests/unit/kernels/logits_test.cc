// CpuLogits in every arithmetic, and what it refuses. What logits are is held to the reference for all
// devices in tests/conformance/logits_test.cc.
#include "kernels/logits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cpu/arithmetic.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::logits_test {
namespace {

using cpu::Arithmetic;
using cpu::RunLogits;
using testing::Describe;
using testing::GuardedBytes;
using testing::Problem;
using testing::RandomProblem;
using testing::RelativeError;
using testing::RunReference;
using testing::SameBits;
using testing::Shape;

LogitsParams ParamsOf(const Problem& problem) {
  LogitsParams params;
  params.rows = problem.shape.tokens;
  params.vocab = problem.shape.vocab;
  params.hidden = problem.shape.hidden;
  params.weight_type = problem.weight_type;
  params.weight = problem.weight.data();
  params.hidden_type = problem.hidden_type;
  params.hidden_states = problem.hidden_states.data();
  params.logit_scale = problem.options.logit_scale;
  params.softcap = problem.options.softcap;
  return params;
}

// With a workspace of so many rows.
std::vector<float> LogitsOf(const Problem& problem, Arithmetic arithmetic, int64_t tile_rows) {
  const Shape& shape = problem.shape;
  GuardedBytes workspace(cpu::WorkspaceBytes(tile_rows, shape.vocab, shape.hidden, arithmetic), 64);
  GuardedBytes logits(shape.tokens * shape.vocab * 4, 64, 4);
  LogitsParams params = ParamsOf(problem);
  params.outputs.logits = logits.data();
  params.workspace = workspace.data();
  params.workspace_bytes = workspace.size();
  EXPECT_EQ(RunLogits(params, arithmetic), Status::kOk);
  EXPECT_TRUE(workspace.Intact() && logits.Intact());
  return {logits.As<float>(), logits.As<float>() + shape.tokens * shape.vocab};
}

TEST(Logits, AgreeWithTheReferenceInEveryArithmeticWhateverFits) {
  for (const Arithmetic arithmetic : {Arithmetic::kSimd, Arithmetic::kLibraryFloat32}) {
    for (const Shape& shape : {Shape{1, 1, 1}, Shape{30, 700, 40}, Shape{13, 513, 300}}) {
      SCOPED_TRACE(Describe(shape) + " " + std::to_string(static_cast<int>(arithmetic)));
      Problem problem = RandomProblem({.shape = shape, .logit_deviation = 2.0});
      problem.options.softcap = 5.0f;
      const std::vector<float> logits = LogitsOf(problem, arithmetic, shape.tokens);
      EXPECT_LT(RelativeError(logits, RunReference(problem).logits), 2e-6);
      for (const int64_t tile_rows : {int64_t{1}, std::min<int64_t>(shape.tokens, 7)}) {
        const std::vector<float> in_tiles = LogitsOf(problem, arithmetic, tile_rows);
        EXPECT_LT(RelativeError(in_tiles, {logits.begin(), logits.end()}), 2e-6) << tile_rows;
        // The library chooses by the number of rows how to multiply in fp32, which is for tests alone.
        EXPECT_TRUE(arithmetic != Arithmetic::kSimd || SameBits(in_tiles, logits)) << tile_rows;
      }
    }
  }
}

TEST(Logits, WithoutAnythingWantedNothingIsWritten) {
  const Problem problem = RandomProblem({.shape = {3, 20, 8}});
  GuardedBytes workspace(cpu::WorkspaceBytes(3, 20, 8, Arithmetic::kSimd), 64);
  LogitsParams params = ParamsOf(problem);
  params.workspace = workspace.data();
  params.workspace_bytes = workspace.size();
  EXPECT_EQ(CpuLogits(params), Status::kOk);
  EXPECT_TRUE(workspace.Intact());
}

TEST(Logits, WhatCannotBeComputedIsRefused) {
  const Problem problem = RandomProblem({.shape = {3, 20, 8}});
  GuardedBytes workspace(cpu::WorkspaceBytes(3, 20, 8, Arithmetic::kSimd), 64);
  std::vector<float> values(3 * 65);
  std::vector<int32_t> tokens(3 * 65);
  const auto spoiled = [&](const std::function<void(LogitsParams&)>& spoil) {
    LogitsParams params = ParamsOf(problem);
    params.workspace = workspace.data();
    params.workspace_bytes = workspace.size();
    params.outputs.top_k = 2;
    params.outputs.top_tokens = tokens.data();
    params.outputs.top_logits = params.outputs.log_sum_exp = values.data();
    spoil(params);
    return CpuLogits(params);
  };
  EXPECT_EQ(spoiled([](LogitsParams&) {}), Status::kOk);
  const std::vector<std::function<void(LogitsParams&)>> invalid = {
      [](LogitsParams& p) { p.rows = 0; },
      [](LogitsParams& p) { p.vocab = -1; },
      [](LogitsParams& p) { p.hidden = INT64_MAX; },
      [](LogitsParams& p) { p.weight = nullptr; },
      [](LogitsParams& p) { p.hidden_states = nullptr; },
      [](LogitsParams& p) { p.logit_scale = 0; },
      [](LogitsParams& p) { p.softcap = NAN; },
      [](LogitsParams& p) { p.outputs.top_k = -1; },
      [](LogitsParams& p) { p.outputs.top_k = 21; },
      [](LogitsParams& p) { p.outputs.log_sum_exp = nullptr; },
      [](LogitsParams& p) { p.workspace = nullptr; },
      [](LogitsParams& p) { p.workspace = static_cast<char*>(p.workspace) + 4; },
      [](LogitsParams& p) { p.outputs.type = static_cast<DataType>(7); },
  };
  for (size_t i = 0; i < invalid.size(); ++i) {
    EXPECT_EQ(spoiled(invalid[i]), Status::kInvalidArgument) << i;
  }
  EXPECT_EQ(spoiled([](LogitsParams& p) { p.workspace_bytes = 64; }), Status::kWorkspaceTooSmall);
}

}  // namespace
}  // namespace lossd::kernels::logits_test
