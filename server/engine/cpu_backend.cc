#include "server/engine/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/linear_cross_entropy.h"
#include "server/engine/chunk_options.h"
#include "server/engine/errors.h"
#include "server/engine/process_memory.h"

namespace lossd::engine {
namespace {

using kernels::DataType;

absl::Status KernelError(absl::string_view what, kernels::Status status) {
  return MakeError(absl::StatusCode::kInternal, RejectReason::kInternal, "",
                   absl::StrCat(what, " failed: ", kernels::StatusName(status)));
}

struct CpuGradient : Gradient {
  HostBuffer dw;  // fp32 [V, H]
  HostBuffer db;  // fp32 [V]; empty without a bias
  bool empty = true;
};

class CpuBackend : public HeadBackend {
 public:
  CpuBackend(HeadConfig config, HostBuffer* workspace, CpuGradient gradient)
      : config_(std::move(config)), workspace_(workspace), own_(std::move(gradient)) {}

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

  absl::Status PrepareTeacher(const HeadBackend& backend) override {
    const HeadConfig& teacher = static_cast<const CpuBackend&>(backend).config_;  // of the same device
    const int64_t row =
        kernels::WorkspaceBytes(1, config_.vocab_size, config_.hidden_size, config_.weight_type,
                                {teacher.hidden_size, teacher.weight_type});
    return row > workspace_->size() ? NoRoomForTeacher(config_, row, workspace_->size()) : absl::OkStatus();
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

  absl::Status ReadGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) override {
    const CpuGradient& gradient = of == nullptr ? own_ : *static_cast<const CpuGradient*>(of);
    return Read(gradient, gradient.dw, first_row * config_.hidden_size, rows * config_.hidden_size, out);
  }

  absl::Status ReadBiasGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) override {
    const CpuGradient& gradient = of == nullptr ? own_ : *static_cast<const CpuGradient*>(of);
    return Read(gradient, gradient.db, first_row, rows, out);
  }

  void Reset(Gradient* gradient) override { Find(gradient).empty = true; }

  MemoryPlan MemoryReport() const override {
    MemoryPlan plan = {{"weights", weights_.size() + bias_.size()}};
    if (own_.dw.size() > 0) plan.push_back({"gradient", own_.dw.size() + own_.db.size()});
    return plan;
  }

 private:
  bool Accumulates(const ChunkRows& rows) const {
    return rows.accumulate == ChunkRows::Accumulate::kYes &&
           config_.weight_gradients == WeightGradients::kAccumulated;
  }

  CpuGradient& Find(Gradient* gradient) {
    return gradient == nullptr ? own_ : *static_cast<CpuGradient*>(gradient);
  }

  static const float* Floats(const HostBuffer& buffer) {
    return reinterpret_cast<const float*>(buffer.data());
  }
  static float* Floats(HostBuffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

  static absl::Status Read(const CpuGradient& gradient, const HostBuffer& buffer, int64_t first,
                           int64_t count, float* out) {
    if (gradient.empty) {
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
    kernels::Teacher teacher;
    if (kind.teacher.backend != nullptr) {
      teacher = TeacherOf(kind.teacher, rows);
      params.teacher = &teacher;
      params.distillation = kind.teacher.distillation;
    }
    params.on_input_gradients = [](void* context) { (*static_cast<std::function<void()>*>(context))(); };
    params.on_input_gradients_context = &tell;
    kernels::LinearCrossEntropyStats stats;
    const kernels::Status status = kernels::CpuLinearCrossEntropy(params, &stats);
    if (status != kernels::Status::kOk) return status;
    if (Accumulates(rows) && stats.valid_tokens > 0) Find(kind.gradient).empty = false;
    report->rows_redone += stats.rows_redone;
    return status;
  }

  // The products want one piece, aligned: where it is not, it is made in `gathered`.
  static const void* OnePiece(const HiddenRows& rows, int64_t elements, DataType type,
                              ResultBytes* gathered) {
    const int64_t element = kernels::SizeOf(type);
    if (rows.data != nullptr &&
        reinterpret_cast<uintptr_t>(rows.data) % static_cast<uintptr_t>(element) == 0) {
      return rows.data;
    }
    const int64_t bytes = elements * element;
    if (gathered->size() < bytes) *gathered = ResultBytes(bytes);
    if (rows.data != nullptr) {
      std::memcpy(gathered->data(), rows.data, static_cast<size_t>(bytes));
    } else {
      Gather(rows.parts, gathered->data());
    }
    return gathered->data();
  }

  // Of a batch that `kind` says has one.
  kernels::Teacher TeacherOf(const TeacherKind& kind, const ChunkRows& rows) {
    const auto& backend = static_cast<const CpuBackend&>(*kind.backend);  // of the same device
    kernels::Teacher teacher;
    teacher.hidden = backend.config_.hidden_size;
    teacher.weight_type = backend.config_.weight_type;
    teacher.weight = backend.weights_.data();
    if (backend.config_.bias) teacher.bias = Floats(backend.bias_);
    teacher.logit_scale = backend.config_.logit_scale;
    teacher.softcap = backend.config_.softcap;
    teacher.hidden_type = kind.hidden_type;
    teacher.hidden_states =
        OnePiece(rows.teacher_hidden, rows.tokens * teacher.hidden, kind.hidden_type, &teacher_gathered_);
    return teacher;
  }

  // Where losses go that nobody wants.
  float* UnusedLosses(int64_t tokens) {
    unused_losses_.resize(std::max(unused_losses_.size(), static_cast<size_t>(tokens)));
    return unused_losses_.data();
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
    params.hidden_states =
        OnePiece(rows.hidden_states, rows.tokens * config_.hidden_size, kind.hidden_type, &gathered_);
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
    params.losses = rows.losses != nullptr ? rows.losses : UnusedLosses(rows.tokens);
    params.returns = rows.returns;
    params.dx_type = kind.dx_type;
    params.dx = rows.dx;
    if (Accumulates(rows)) {
      CpuGradient& gradient = Find(kind.gradient);
      params.weight_gradient =
          gradient.empty ? kernels::WeightGradient::kOverwrite : kernels::WeightGradient::kAccumulate;
      params.dw = Floats(gradient.dw);
      // Of rows without the bias too: what they overwrite, they clear.
      if (config_.bias) params.db = Floats(gradient.db);
    }
    params.workspace = workspace_->data();
    params.workspace_bytes = workspace_->size();
    return params;
  }

  const HeadConfig config_;
  HostBuffer* const workspace_;
  HostBuffer weights_;
  HostBuffer bias_;
  CpuGradient own_;
  ResultBytes gathered_;  // hidden states of one chunk
  ResultBytes teacher_gathered_;
  std::vector<float> unused_losses_;
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(HostBuffer workspace) : workspace_(std::move(workspace)) {}

  std::string name() const override { return "cpu"; }
  std::string description() const override {
    return absl::StrCat("CPU, ", std::max(1U, std::thread::hardware_concurrency()), " hardware threads");
  }

  int64_t AvailableMemory() const override { return engine::AvailableMemory() / 10 * 8; }
  DeviceTotals Totals() const override { return {TotalMemory(), engine::AvailableMemory()}; }

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
    absl::StatusOr<CpuGradient> gradient = MakeGradient(config);
    if (!gradient.ok()) return gradient.status();
    return std::make_unique<CpuBackend>(config, &workspace_, *std::move(gradient));
  }

  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const HeadConfig& config) override {
    absl::StatusOr<CpuGradient> gradient = MakeGradient(config);
    if (!gradient.ok()) return gradient.status();
    return std::make_unique<CpuGradient>(*std::move(gradient));
  }

  MemoryPlan SharedMemory() const override { return {{"workspace", workspace_.size()}}; }

 private:
  static absl::StatusOr<CpuGradient> MakeGradient(const HeadConfig& config) {
    absl::StatusOr<HostBuffer> dw = HostBuffer::Create(config.gradient_bytes(), Commit::kNow);
    if (!dw.ok()) return dw.status();
    absl::StatusOr<HostBuffer> db = HostBuffer::Create(config.bias_gradient_bytes(), Commit::kNow);
    if (!db.ok()) return db.status();
    CpuGradient gradient;
    gradient.dw = *std::move(dw);
    gradient.db = *std::move(db);
    return gradient;
  }

  HostBuffer workspace_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(int64_t workspace_bytes) {
  absl::StatusOr<HostBuffer> workspace = HostBuffer::Create(workspace_bytes, Commit::kOnUse);
  if (!workspace.ok()) return workspace.status();
  return std::make_unique<CpuDevice>(*std::move(workspace));
}

}  // namespace lossd::engine
