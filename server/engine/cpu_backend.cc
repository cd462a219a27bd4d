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
  CpuBackend(HeadConfig config, HostBuffer* workspace, HostBuffer gradient)
      : config_(std::move(config)), workspace_(workspace), gradient_(std::move(gradient)) {}

  absl::Status PublishWeights(HostBuffer staged) override {
    weights_ = std::move(staged);
    return absl::OkStatus();
  }

  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, DataType type, void* out) override {
    const int64_t offset = first_row * config_.hidden_size;
    kernels::Convert(config_.weight_type, weights_.data() + offset * kernels::SizeOf(config_.weight_type),
                     type, out, rows * config_.hidden_size);
    return absl::OkStatus();
  }

  absl::StatusOr<BatchReport> ProcessBatch(const RowBatch& batch,
                                           absl::FunctionRef<void()> on_input_gradients) override {
    kernels::LinearCrossEntropyParams params = ToParams(batch);
    params.on_input_gradients = [](void* context) { (*static_cast<absl::FunctionRef<void()>*>(context))(); };
    params.on_input_gradients_context = &on_input_gradients;
    kernels::LinearCrossEntropyStats stats;
    const kernels::Status status = kernels::CpuLinearCrossEntropy(params, &stats);
    if (status != kernels::Status::kOk) return KernelError("the fused step", status);
    if (batch.accumulate == RowBatch::Accumulate::kYes && stats.valid_tokens > 0) gradient_empty_ = false;
    return BatchReport{stats.valid_tokens, stats.rows_redone};
  }

  absl::Status ReadGradientRows(int64_t first_row, int64_t rows, float* out) override {
    const int64_t count = rows * config_.hidden_size;
    if (gradient_empty_) {
      std::fill_n(out, count, 0.0f);
    } else {
      std::memcpy(out, gradient() + first_row * config_.hidden_size,
                  static_cast<size_t>(count) * sizeof(float));
    }
    return absl::OkStatus();
  }

  void ResetGradient() override { gradient_empty_ = true; }

  MemoryPlan MemoryReport() const override {
    return {{"weights", weights_.size()}, {"gradient", gradient_.size()}};
  }

 private:
  float* gradient() { return reinterpret_cast<float*>(gradient_.data()); }

  kernels::LinearCrossEntropyParams ToParams(const RowBatch& batch) {
    kernels::LinearCrossEntropyParams params;
    params.tokens = batch.tokens;
    params.vocab = config_.vocab_size;
    params.hidden = config_.hidden_size;
    params.weight_type = config_.weight_type;
    params.weight = weights_.data();
    params.hidden_type = batch.hidden_type;
    params.hidden_states = batch.hidden_states;
    params.labels = batch.labels;
    params.ignore_index = batch.ignore_index;
    params.gradient_scale = batch.gradient_scale;
    params.losses = batch.losses;
    params.dx_type = batch.dx_type;
    params.dx = batch.dx;
    if (batch.accumulate == RowBatch::Accumulate::kYes) {
      params.weight_gradient =
          gradient_empty_ ? kernels::WeightGradient::kOverwrite : kernels::WeightGradient::kAccumulate;
      params.dw = gradient();
    }
    params.workspace = workspace_->data();
    params.workspace_bytes = workspace_->size();
    return params;
  }

  const HeadConfig config_;
  HostBuffer* const workspace_;
  HostBuffer weights_;
  HostBuffer gradient_;
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
    return MemoryPlan{{"weights", config.weight_bytes()},
                      {"gradient", config.gradient_bytes()},
                      {"weight_staging", config.weight_bytes()}};
  }

  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    absl::StatusOr<HostBuffer> gradient = HostBuffer::Create(config.gradient_bytes(), Commit::kNow);
    if (!gradient.ok()) return gradient.status();
    return std::make_unique<CpuBackend>(config, &workspace_, *std::move(gradient));
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
