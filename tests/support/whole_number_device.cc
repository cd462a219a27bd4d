#include "tests/support/whole_number_device.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/data_type.h"
#include "server/engine/device/cpu/cpu_head.h"
#include "server/engine/memory/host_buffer.h"

namespace lossd::testing {
namespace {

using engine::BatchKey;
using engine::ChunkRows;
using engine::Gradient;
using engine::GradientTallies;
using kernels::DataType;

// Norms of 1.5 and 2.5.
GradientTallies AlwaysTheSame() {
  GradientTallies tallies;
  tallies.dw.front() = {.squares = 2.25, .largest = 3.5F, .non_finite = 4};
  tallies.db.front() = {.squares = 6.25};
  return tallies;
}

class WholeNumberHead : public engine::CpuBackend {
 public:
  WholeNumberHead(const engine::HeadConfig& config, engine::HostBuffer* workspace)
      : CpuBackend(config, engine::HeadShard::Whole(config.vocab_size), workspace), config_(config) {}

  void StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks,
                  engine::BatchCallbacks callbacks) override {
    for (size_t i = 0; i < chunks.size(); ++i) {
      const std::vector<float> x = HiddenStates(kind, chunks[i]);
      if (kind.mode != engine::ComputeMode::kWeightGradientOnly) Answer(kind, chunks[i], x);
      callbacks.on_input_gradients(i);
      if (chunks[i].accumulate == ChunkRows::Accumulate::kYes &&
          config_.weight_gradients == engine::WeightGradients::kAccumulated) {
        Add(kind.gradient, chunks[i], x);
      }
    }
    callbacks.on_done(engine::BatchReport{});
  }

  absl::Status ReadBiasGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) override {
    std::vector<float> dw(static_cast<size_t>(rows * config_.hidden_size));
    const absl::Status status = ReadGradient(of, first_row, rows, dw.data());
    for (int64_t row = 0; row < rows; ++row) out[row] = dw[At(row)] / 2;
    return status;
  }
  absl::StatusOr<GradientTallies> Summarize(const Gradient* /*gradient*/, double /*scale*/) override {
    return AlwaysTheSame();
  }
  absl::StatusOr<GradientTallies> ApplyStep(const Gradient* gradient,
                                            const engine::StepArguments& arguments) override {
    const auto tallies = CpuBackend::ApplyStep(gradient, arguments);
    return tallies.ok() ? AlwaysTheSame() : tallies;
  }

 private:
  size_t At(int64_t row, int64_t column = 0) const {
    return static_cast<size_t>(row * config_.hidden_size + column);
  }

  std::vector<float> HiddenStates(const BatchKey& kind, const ChunkRows& rows) const {
    const int64_t count = rows.tokens * config_.hidden_size;
    std::vector<std::byte> bytes(static_cast<size_t>(count * kernels::SizeOf(kind.hidden_type)));
    if (rows.hidden_states.data != nullptr) {
      std::memcpy(bytes.data(), rows.hidden_states.data, bytes.size());
    } else {
      engine::Gather(rows.hidden_states.parts, bytes.data());
    }
    std::vector<float> x(static_cast<size_t>(count));
    kernels::Convert(kind.hidden_type, bytes.data(), DataType::kFloat32, x.data(), count);
    return x;
  }

  void Answer(const BatchKey& kind, const ChunkRows& rows, const std::vector<float>& x) const {
    std::vector<float> dx(x.size());
    for (int64_t i = 0; i < rows.tokens; ++i) {
      const bool valid = rows.labels[i] != rows.ignore_index;
      const auto label = static_cast<float>(rows.labels[i]);
      rows.losses[i] = valid ? label + x[At(i)] : 0;
      if (rows.token_weights != nullptr) rows.losses[i] *= rows.token_weights[i];
      for (int64_t j = 0; valid && j < config_.hidden_size; ++j) dx[At(i, j)] = 2 * x[At(i, j)];
      Return(rows, i);
    }
    if (rows.dx == nullptr) return;
    kernels::Convert(DataType::kFloat32, dx.data(), kind.dx_type, rows.dx, static_cast<int64_t>(dx.size()));
  }

  static void Return(const ChunkRows& rows, int64_t i) {
    const kernels::RowReturns& returns = rows.returns;
    const auto token = static_cast<int32_t>(rows.labels[i]);
    const auto value = static_cast<float>(token);
    const auto set = [i](auto* values, auto to) {
      if (values != nullptr) values[i] = to;
    };
    set(returns.log_sum_exp, rows.lse_gradients == nullptr ? 0 : rows.lse_gradients[i]);
    set(returns.z_loss, 1.0F);
    set(returns.log_probability, value);
    set(returns.entropy, value);
    set(returns.prediction, token);
    set(returns.target_rank, token);
    set(returns.divergence, value / 2);
    for (int32_t k = 0; k < returns.top_k; ++k) {
      returns.top_tokens[i * returns.top_k + k] = token + k;
      returns.top_log_probabilities[i * returns.top_k + k] = value;
    }
  }

  void Add(Gradient* gradient, const ChunkRows& rows, const std::vector<float>& x) {
    std::vector<float> dw(static_cast<size_t>(config_.elements()));
    absl::Status status = ReadGradient(gradient, 0, config_.vocab_size, dw.data());
    for (int64_t i = 0; i < rows.tokens; ++i) {
      if (rows.labels[i] == rows.ignore_index) continue;
      for (int64_t j = 0; j < config_.hidden_size; ++j) {
        dw[At(rows.labels[i], j)] += rows.gradient_scale * x[At(i, j)];
      }
    }
    status.Update(WriteGradient(gradient, 0, config_.vocab_size, dw.data(), nullptr));
    status.IgnoreError();  // there is none in the host's memory
  }

  const engine::HeadConfig config_;
};

class WholeNumberDevice : public engine::Device {
 public:
  explicit WholeNumberDevice(engine::HostBuffer workspace) : workspace_(std::move(workspace)) {}

  std::string name() const override { return "whole numbers"; }
  std::string description() const override { return "whole numbers"; }
  int64_t AvailableMemory() const override { return int64_t{1} << 30; }
  absl::StatusOr<engine::MemoryPlan> PlanMemory(const engine::HeadConfig& config) const override {
    return engine::MemoryPlan{{"weights", config.weight_bytes()}, {"gradient", config.gradient_bytes()}};
  }
  absl::StatusOr<std::unique_ptr<engine::HeadBackend>> CreateHead(const engine::HeadConfig& config) override {
    auto head = std::make_unique<WholeNumberHead>(config, &workspace_);
    if (absl::Status status = head->Allocate(); !status.ok()) return status;
    return head;
  }
  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const engine::HeadConfig& config) override {
    auto gradient = engine::CpuGradient::Create(config);
    if (!gradient.ok()) return gradient.status();
    return std::make_unique<engine::CpuGradient>(*std::move(gradient));
  }
  engine::MemoryPlan SharedMemory() const override { return {{"workspace", workspace_.size()}}; }

 private:
  engine::HostBuffer workspace_;
};

}  // namespace

std::unique_ptr<engine::Device> MakeWholeNumberDevice() {
  return std::make_unique<WholeNumberDevice>(
      *engine::HostBuffer::Create(int64_t{1} << 20, engine::Commit::kOnUse));
}

}  // namespace lossd::testing
