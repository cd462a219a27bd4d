#include "server/engine/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/linear_cross_entropy.h"
#include "server/engine/errors.h"
#include "server/engine/process_memory.h"

namespace lossd::engine {
namespace {

using kernels::DataType;

absl::Status KernelError(absl::string_view what, kernels::Status status) {
  return MakeError(absl::StatusCode::kInternal, RejectReason::kInternal, "",
                   absl::StrCat(what, " failed: ", kernels::StatusName(status)));
}

class CpuBackend : public HeadBackend {
 public:
  CpuBackend(HeadConfig config, HostBuffer* workspace, HostBuffer gradient, HostBuffer bias_gradient)
      : config_(std::move(config)),
        workspace_(workspace),
        gradient_(std::move(gradient)),
        bias_gradient_(std::move(bias_gradient)) {}

  absl::Status PublishWeights(WeightBuffers staged) override {
    weights_ = std::move(staged.weights);
    bias_ = std::move(staged.bias);
    return absl::OkStatus();
  }

  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, DataType type, void* out) override {
    const int64_t offset = first_row * config_.hidden_size;
    kernels::Convert(config_.weight_type, weights_.data() + offset * kernels::SizeOf(config_.weight_type),
                     type, out, rows * config_.hidden_size);
    return absl::OkStatus();
  }

  absl::Status ReadBias(int64_t first_row, int64_t rows, float* out) override {
    std::memcpy(out, Floats(bias_) + first_row, static_cast<size_t>(rows) * sizeof(float));
    return absl::OkStatus();
  }

  // Chunks are not gathered: the products gain little by it, and with one client the order of dW's sums stays
  // that of its sequences.
  int64_t RowsPerBatch(const RowKind& /*kind*/) const override { return 1; }

  void StartBatch(const RowKind& kind, std::span<const ChunkRows> chunks, BatchCallbacks callbacks) override {
    BatchReport report;
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (const kernels::Status status = Process(kind, chunks[i], i, callbacks, &report);
          status != kernels::Status::kOk) {
        callbacks.on_done(KernelError("the fused step", status));
        return;
      }
    }
    callbacks.on_done(report);
  }

  absl::Status ReadGradientRows(int64_t first_row, int64_t rows, float* out) override {
    return ReadGradient(gradient_, first_row * config_.hidden_size, rows * config_.hidden_size, out);
  }

  absl::Status ReadBiasGradient(int64_t first_row, int64_t rows, float* out) override {
    return ReadGradient(bias_gradient_, first_row, rows, out);
  }

  void ResetGradient() override { gradient_empty_ = true; }

  MemoryPlan MemoryReport() const override {
    MemoryPlan plan = {{"weights", weights_.size() + bias_.size()}};
    if (gradient_.size() > 0) plan.push_back({"gradient", gradient_.size() + bias_gradient_.size()});
    return plan;
  }

 private:
  bool Accumulates(const ChunkRows& rows) const {
    return rows.accumulate == ChunkRows::Accumulate::kYes &&
           config_.weight_gradients == WeightGradients::kAccumulated;
  }

  static float* Floats(HostBuffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

  absl::Status ReadGradient(HostBuffer& buffer, int64_t first, int64_t count, float* out) {
    if (gradient_empty_) {
      std::fill_n(out, count, 0.0f);
    } else {
      std::memcpy(out, Floats(buffer) + first, static_cast<size_t>(count) * sizeof(float));
    }
    return absl::OkStatus();
  }

  kernels::Status Process(const RowKind& kind, const ChunkRows& rows, size_t number,
                          const BatchCallbacks& callbacks, BatchReport* report) {
    std::function<void()> tell = [&callbacks, number] { callbacks.on_input_gradients(number); };
    kernels::LinearCrossEntropyParams params = ToParams(kind, rows);
    params.on_input_gradients = [](void* context) { (*static_cast<std::function<void()>*>(context))(); };
    params.on_input_gradients_context = &tell;
    kernels::LinearCrossEntropyStats stats;
    const kernels::Status status = kernels::CpuLinearCrossEntropy(params, &stats);
    if (status != kernels::Status::kOk) return status;
    if (Accumulates(rows) && stats.valid_tokens > 0) gradient_empty_ = false;
    report->rows_redone += stats.rows_redone;
    return status;
  }

  // The products want one piece, aligned.
  const void* HiddenStates(const RowKind& kind, const ChunkRows& rows) {
    const int64_t element = kernels::SizeOf(kind.hidden_type);
    if (reinterpret_cast<uintptr_t>(rows.hidden_states) % static_cast<uintptr_t>(element) == 0 &&
        rows.hidden_states != nullptr) {
      return rows.hidden_states;
    }
    const int64_t bytes = rows.tokens * config_.hidden_size * element;
    if (gathered_.size() < bytes) gathered_ = ResultBytes(bytes);
    if (rows.hidden_states != nullptr) {
      std::memcpy(gathered_.data(), rows.hidden_states, static_cast<size_t>(bytes));
    } else {
      Gather(rows.hidden_parts, gathered_.data());
    }
    return gathered_.data();
  }

  kernels::LinearCrossEntropyParams ToParams(const RowKind& kind, const ChunkRows& rows) {
    kernels::LinearCrossEntropyParams params;
    params.tokens = rows.tokens;
    params.vocab = config_.vocab_size;
    params.hidden = config_.hidden_size;
    params.weight_type = config_.weight_type;
    params.weight = weights_.data();
    if (kind.bias == Bias::kUse && config_.bias) params.bias = Floats(bias_);
    params.hidden_type = kind.hidden_type;
    params.hidden_states = HiddenStates(kind, rows);
    params.labels = rows.labels;
    params.ignore_index = rows.ignore_index;
    params.options = kind.options;
    if (kind.class_weights == ClassWeights::kUse && config_.class_weights != nullptr) {
      params.class_weights = config_.class_weights->data();
    }
    params.token_weights = rows.token_weights;
    params.lse_gradients = rows.lse_gradients;
    params.gradient_scale = rows.gradient_scale;
    params.z_gradient_scale = rows.z_gradient_scale;
    params.losses = rows.losses;
    params.returns = rows.returns;
    params.dx_type = kind.dx_type;
    params.dx = rows.dx;
    if (Accumulates(rows)) {
      params.weight_gradient =
          gradient_empty_ ? kernels::WeightGradient::kOverwrite : kernels::WeightGradient::kAccumulate;
      params.dw = Floats(gradient_);
      // Of rows without the bias too: what they overwrite, they clear.
      if (config_.bias) params.db = Floats(bias_gradient_);
    }
    params.workspace = workspace_->data();
    params.workspace_bytes = workspace_->size();
    return params;
  }

  const HeadConfig config_;
  HostBuffer* const workspace_;
  HostBuffer weights_;
  HostBuffer bias_;
  HostBuffer gradient_;
  HostBuffer bias_gradient_;
  ResultBytes gathered_;  // hidden states of one chunk
  bool gradient_empty_ = true;
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(HostBuffer workspace) : workspace_(std::move(workspace)) {}

  std::string name() const override { return "cpu"; }
  std::string description() const override {
    return absl::StrCat("CPU, ", std::max(1U, std::thread::hardware_concurrency()), " hardware threads");
  }

  int64_t AvailableMemory() const override { return engine::AvailableMemory() / 10 * 8; }

  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    const int64_t row = kernels::WorkspaceBytes(1, config.vocab_size, config.hidden_size, config.weight_type);
    if (row > workspace_.size()) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, RejectReason::kShape, "vocab_size",
          absl::StrCat("one row of vocab_size ", config.vocab_size, " needs a workspace of ", row,
                       " bytes, the server has ", workspace_.size(), "; raise --workspace_bytes"));
    }
    // Weights are written into a second buffer and published by exchanging the two.
    const int64_t weights = config.weight_bytes() + config.bias_bytes();
    MemoryPlan plan = {{"weights", weights}};
    if (config.gradient_bytes() > 0) {
      plan.push_back({"gradient", config.gradient_bytes() + config.bias_gradient_bytes()});
    }
    plan.push_back({"weight_staging", weights});
    return plan;
  }

  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    absl::StatusOr<HostBuffer> gradient = HostBuffer::Create(config.gradient_bytes(), Commit::kNow);
    if (!gradient.ok()) return gradient.status();
    absl::StatusOr<HostBuffer> bias = HostBuffer::Create(config.bias_gradient_bytes(), Commit::kNow);
    if (!bias.ok()) return bias.status();
    return std::make_unique<CpuBackend>(config, &workspace_, *std::move(gradient), *std::move(bias));
  }

  MemoryPlan SharedMemory() const override { return {{"workspace", workspace_.size()}}; }

 private:
  HostBuffer workspace_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(int64_t workspace_bytes) {
  absl::StatusOr<HostBuffer> workspace = HostBuffer::Create(workspace_bytes, Commit::kOnUse);
  if (!workspace.ok()) return workspace.status();
  return std::make_unique<CpuDevice>(*std::move(workspace));
}

}  // namespace lossd::engine
