#include "bench/kernels/cpu_step.h"

#include <cmath>
#include <random>
#include <sstream>
#include <thread>

#include "kernels/cpu/simd_kernels.h"

namespace lossd::bench {

using kernels::DataType;

CpuWorkspace NewCpuWorkspace(int64_t bytes) {
  const int64_t aligned = (bytes + 63) / 64 * 64;
  return CpuWorkspace(static_cast<unsigned char*>(std::aligned_alloc(64, static_cast<size_t>(aligned))));
}

std::string CpuStep::Hardware() {
  std::ostringstream text;
  text << std::thread::hardware_concurrency() << " threads, " << kernels::cpu::BestSimdKernels().name;
  return text.str();
}

std::vector<unsigned char> CpuStep::Narrowed(const std::vector<float>& values) const {
  std::vector<unsigned char> narrow(values.size() * static_cast<size_t>(kernels::SizeOf(case_.dtype)));
  kernels::Convert(DataType::kFloat32, values.data(), case_.dtype, narrow.data(),
                   static_cast<int64_t>(values.size()));
  return narrow;
}

// Values as the head's type holds them, in fp32.
std::vector<float> CpuStep::Rounded(const std::vector<float>& values) const {
  std::vector<float> wide(values.size());
  kernels::Convert(case_.dtype, Narrowed(values).data(), DataType::kFloat32, wide.data(),
                   static_cast<int64_t>(values.size()));
  return wide;
}

void CpuStep::MakeInputs() {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](int64_t count, float deviation) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = deviation * normal(random);
    return values;
  };
  const auto h = static_cast<float>(case_.hidden);
  operands_.tokens = case_.tokens;
  operands_.vocab = case_.vocab;
  operands_.hidden = case_.hidden;
  operands_.weight = Rounded(fill(case_.vocab * case_.hidden, 2.0f / std::sqrt(h)));
  operands_.hidden_states = fill(case_.tokens * case_.hidden, 1.0f);
  // Logits of deviation d have a log-sum-exp of about log V + d²/2.
  std::uniform_real_distribution<double> spread(0, case_.lse_spread);
  for (int64_t r = 0; r < case_.tokens && case_.lse_spread > 0; ++r) {
    const auto scale = static_cast<float>(std::sqrt(2 * spread(random)) / 2);
    for (int64_t i = 0; i < case_.hidden; ++i) operands_.hidden_states[r * case_.hidden + i] *= scale;
  }
  operands_.hidden_states = Rounded(operands_.hidden_states);
  std::uniform_int_distribution<int64_t> label(0, case_.vocab - 1);
  labels_.resize(static_cast<size_t>(case_.tokens));
  for (int64_t& value : labels_) value = label(random);
  weight_ = Narrowed(operands_.weight);
  hidden_states_ = Narrowed(operands_.hidden_states);
}

std::string CpuStep::Create() {
  MakeInputs();
  losses_.assign(static_cast<size_t>(case_.tokens), 0.0f);
  dx_.assign(static_cast<size_t>(case_.tokens * case_.hidden * kernels::SizeOf(case_.dtype)), 0xff);
  dw_.assign(static_cast<size_t>(case_.vocab * case_.hidden), 0.0f);
  workspace_ = NewCpuWorkspace(case_.workspace_bytes);
  if (workspace_ == nullptr) return "out of memory for the workspace";

  params_.tokens = case_.tokens;
  params_.vocab = case_.vocab;
  params_.hidden = case_.hidden;
  params_.weight_type = params_.hidden_type = params_.dx_type = case_.dtype;
  params_.weight = weight_.data();
  params_.hidden_states = hidden_states_.data();
  params_.labels = labels_.data();
  // Gradients are scaled as for a mean, except in fp16: there dX would be too small, which is why trainers
  // scale their losses.
  params_.gradient_scale = case_.dtype == DataType::kFloat16 ? 1.0f : 1.0f / static_cast<float>(case_.tokens);
  params_.options = case_.options;
  params_.losses = losses_.data();
  params_.dx = dx_.data();
  params_.dw = dw_.data();
  params_.workspace = workspace_.get();
  params_.workspace_bytes = case_.workspace_bytes;
  return "";
}

kernels::Status CpuStep::Run(kernels::WeightGradient weight_gradient,
                             kernels::LinearCrossEntropyStats* stats) {
  params_.weight_gradient = weight_gradient;
  return kernels::CpuLinearCrossEntropy(params_, stats);
}

int64_t CpuStep::batch_bytes() const {
  return static_cast<int64_t>(hidden_states_.size() + dx_.size() + losses_.size() * sizeof(float));
}

}  // namespace lossd::bench
