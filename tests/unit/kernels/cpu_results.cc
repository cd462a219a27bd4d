#include "tests/unit/kernels/cpu_results.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/logits.h"

namespace lossd::kernels::testing {
namespace {

std::vector<double> Wide(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// 0 in ignored rows, and -infinity outside of a row's list of kept tokens.
std::vector<double> LogitsOf(const Problem& problem, cpu::Arithmetic arithmetic) {
  const auto [tokens, vocab, hidden] = problem.shape;
  GuardedBytes workspace(cpu::WorkspaceBytes(tokens, vocab, hidden, arithmetic), 64);
  std::vector<float> logits(static_cast<size_t>(tokens * vocab));
  const LinearCrossEntropyParams step = problem.Params();
  LogitsParams params;
  params.rows = tokens;
  params.vocab = vocab;
  params.hidden = hidden;
  params.weight_type = step.weight_type;
  params.weight = step.weight;
  params.bias = step.bias;
  params.hidden_type = step.hidden_type;
  params.hidden_states = step.hidden_states;
  params.logit_scale = step.options.logit_scale;
  params.softcap = step.options.softcap;
  params.outputs.logits = logits.data();
  params.workspace = workspace.data();
  params.workspace_bytes = workspace.size();
  if (cpu::RunLogits(params, arithmetic) != Status::kOk) return {};
  std::vector<double> wide = Wide(logits);
  for (int64_t r = 0; r < tokens; ++r) {
    const auto row = wide.begin() + r * vocab;
    if (problem.labels[static_cast<size_t>(r)] < 0) std::fill_n(row, vocab, 0.0);
    if (problem.labels[static_cast<size_t>(r)] < 0 || problem.kept_offsets.empty()) continue;
    std::vector<double> listed(static_cast<size_t>(vocab), -std::numeric_limits<double>::infinity());
    for (auto i = problem.kept_offsets[static_cast<size_t>(r)];
         i < problem.kept_offsets[static_cast<size_t>(r + 1)]; ++i) {
      const auto token = static_cast<size_t>(problem.kept_tokens[static_cast<size_t>(i)]);
      listed[token] = row[static_cast<int64_t>(token)];
    }
    std::ranges::copy(listed, row);
  }
  return wide;
}

}  // namespace

Reference CpuResults(const Problem& problem, cpu::Arithmetic arithmetic) {
  const StepResult step = RunStep(problem, {.arithmetic = arithmetic, .top_k = 0});
  if (step.status != Status::kOk) return {};
  Reference results;
  results.losses = Wide(step.losses);
  results.log_sum_exp = Wide(step.log_sum_exp);
  results.z_loss = Wide(step.z_loss);
  results.log_probability = Wide(step.log_probability);
  results.entropy = Wide(step.entropy);
  results.divergence = Wide(step.divergence);
  results.logits = LogitsOf(problem, arithmetic);
  results.dx = Wide(step.dx);
  results.dw = Wide(step.dw);
  results.db = Wide(step.db);
  return results;
}

Reference CpuResults(const Problem& problem) {
  return CpuResults(problem, cpu::BestArithmetic(problem.weight_type));
}

}  // namespace lossd::kernels::testing
