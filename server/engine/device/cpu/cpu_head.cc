// The batches of a head on the CPU.
#include "server/engine/device/cpu/cpu_head.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/logits.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {

using kernels::DataType;

namespace {

absl::Status KernelError(absl::string_view what, kernels::Status status) {
  return MakeError(absl::StatusCode::kInternal, RejectReason::kInternal, "",
                   absl::StrCat(what, " failed: ", kernels::StatusName(status)));
}

// The products need aligned rows in one piece. Other rows are copied into `gathered`.
const void* OnePiece(const HiddenRows& rows, int64_t elements, DataType type, ResultBytes* gathered) {
  const int64_t element = kernels::SizeOf(type);
  if (rows.data != nullptr && reinterpret_cast<uintptr_t>(rows.data) % static_cast<uintptr_t>(element) == 0) {
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

}  // namespace

absl::Status CpuBackend::Logits(const LogitRows& rows) {
  kernels::LogitsParams params;
  params.rows = rows.rows;
  params.vocab = config_.vocab_size;
  params.hidden = config_.hidden_size;
  params.weight_type = config_.weight_type;
  params.weight = weights_.data();
  if (rows.bias == Bias::kUse && config_.bias) params.bias = Floats(bias_);
  params.hidden_type = config_.weight_type;
  params.hidden_states = rows.hidden_states;
  params.logit_scale = rows.logit_scale;
  params.softcap = rows.softcap;
  params.outputs = rows.outputs;
  params.workspace = workspace_->data();
  params.workspace_bytes = workspace_->size();
  const kernels::Status status = kernels::CpuLogits(params);
  return status == kernels::Status::kOk ? absl::OkStatus() : KernelError("computing logits", status);
}

absl::Status CpuBackend::PrepareTeacher(const HeadBackend& backend) {
  const HeadConfig& teacher = static_cast<const CpuBackend&>(backend).config_;  // of the same device
  const int64_t row = kernels::WorkspaceBytes(1, config_.vocab_size, config_.hidden_size, config_.weight_type,
                                              {teacher.hidden_size, teacher.weight_type});
  return row > workspace_->size() ? NoRoomForTeacher(config_, row, workspace_->size()) : absl::OkStatus();
}

void CpuBackend::StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks,
                            BatchCallbacks callbacks) {
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

kernels::Status CpuBackend::Process(const BatchKey& kind, const ChunkRows& rows, size_t number,
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

// The teacher of a batch that `kind` says has one.
kernels::Teacher CpuBackend::TeacherOf(const TeacherKind& kind, const ChunkRows& rows) {
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
float* CpuBackend::UnusedLosses(int64_t tokens) {
  unused_losses_.resize(std::max(unused_losses_.size(), static_cast<size_t>(tokens)));
  return unused_losses_.data();
}

kernels::LinearCrossEntropyParams CpuBackend::ToParams(const BatchKey& kind, const ChunkRows& rows) {
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
    // Rows without the bias have it too: what they overwrite, they clear.
    if (config_.bias) params.db = Floats(gradient.db);
  }
  params.workspace = workspace_->data();
  params.workspace_bytes = workspace_->size();
  return params;
}

}  // namespace lossd::engine
