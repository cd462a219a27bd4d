// The batches of a head on the CPU.
#include "server/engine/device/cpu/cpu_head.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "kernels/collectives/communicator.h"
#include "kernels/cpu/gathered/kept_tokens.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/logits.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {

using kernels::DataType;

namespace {

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

int64_t CpuBackend::LeastWorkspaceBytes(const HeadConfig& config, const HeadShard& shard,
                                        const kernels::TeacherSize* teacher) {
  const auto bytes = [&](kernels::Segments segments) {
    return kernels::WorkspaceBytes(1, shard.For(segments), config.hidden_size, config.weight_type, teacher);
  };
  return std::max(bytes(kernels::Segments::kOfRanks), bytes(kernels::Segments::kFixed));
}

absl::Status CpuBackend::KernelError(absl::string_view what, kernels::Status status) const {
  if (status == kernels::Status::kRankLost) {
    return MakeError(absl::StatusCode::kUnavailable, RejectReason::kInternal, "",
                     absl::StrCat(what, " failed: ", shard_.communicator->failure().message()));
  }
  return MakeError(absl::StatusCode::kInternal, RejectReason::kInternal, "",
                   absl::StrCat(what, " failed: ", kernels::StatusName(status)));
}

const kernels::Shard* CpuBackend::ShardFor(kernels::Segments segments, int32_t holder) {
  if (shard_.layout.ranks() == 1 && segments == kernels::Segments::kOfRanks) return nullptr;
  batch_shard_ = shard_.For(segments, holder);
  return &batch_shard_;
}

absl::StatusOr<const void*> CpuBackend::Spread(int32_t holder, const HiddenRows& rows, int64_t elements,
                                               DataType type, ResultBytes* gathered) const {
  const int64_t bytes = elements * kernels::SizeOf(type);
  const bool holds = shard_.rank == holder;
  const void* own = nullptr;
  if (holds) {
    own = OnePiece(rows, elements, type, gathered);
    if (shard_.communicator == nullptr) return own;
  } else if (gathered->size() < bytes) {
    *gathered = ResultBytes(bytes);
  }
  std::vector<int64_t> from(static_cast<size_t>(shard_.layout.ranks()));
  from[static_cast<size_t>(holder)] = bytes;
  // Only the others are written to.
  void* const all = holds ? const_cast<void*>(own) : gathered->data();
  const kernels::ExchangeWait wait(shard_.observer, kernels::Exchange::kHiddenStates);
  const kernels::collectives::Result spread = shard_.communicator->AllGatherV(own, from, all, nullptr);
  if (!spread.ok()) return KernelError("spreading hidden states", kernels::Status::kRankLost);
  return all;
}

absl::Status CpuBackend::Logits(const LogitRows& rows) {
  const absl::StatusOr<const void*> hidden_states =
      Spread(HeadShard::kLeader, {.data = rows.hidden_states}, rows.rows * config_.hidden_size,
             config_.weight_type, &gathered_);
  if (!hidden_states.ok()) return hidden_states.status();
  kernels::LogitsParams params;
  params.rows = rows.rows;
  params.vocab = config_.vocab_size;
  params.hidden = config_.hidden_size;
  params.weight_type = config_.weight_type;
  params.weight = weights_.data();
  if (rows.bias == Bias::kUse && config_.bias) params.bias = Floats(bias_);
  params.shard = ShardFor(config_.fixed_segments ? kernels::Segments::kFixed : kernels::Segments::kOfRanks,
                          HeadShard::kLeader);
  params.hidden_type = config_.weight_type;
  params.hidden_states = *hidden_states;
  params.logit_scale = rows.logit_scale;
  params.softcap = rows.softcap;
  params.outputs = rows.outputs;
  params.workspace = workspace_->data();
  params.workspace_bytes = workspace_->size();
  const kernels::Status status = kernels::CpuLogits(params);
  return status == kernels::Status::kOk ? absl::OkStatus() : KernelError("computing logits", status);
}

bool CpuBackend::HasRoomForList(int64_t tokens) const {
  return kernels::cpu::KeptWorkspaceBytes(tokens, config_.hidden_size) <= workspace_->size();
}

absl::Status CpuBackend::PrepareTeacher(const HeadBackend& backend) {
  const HeadConfig& teacher = static_cast<const CpuBackend&>(backend).config_;  // of the same device
  const kernels::TeacherSize size{teacher.hidden_size, teacher.weight_type};
  const int64_t row = LeastWorkspaceBytes(config_, shard_, &size);
  return row > workspace_->size() ? NoRoomForTeacher(config_, row, workspace_->size()) : absl::OkStatus();
}

void CpuBackend::StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks,
                            BatchCallbacks callbacks) {
  BatchReport report;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (absl::Status status = Process(kind, chunks[i], i, callbacks, &report); !status.ok()) {
      callbacks.on_done(std::move(status));
      return;
    }
  }
  callbacks.on_done(report);
}

absl::Status CpuBackend::Process(const BatchKey& kind, const ChunkRows& rows, size_t number,
                                 const BatchCallbacks& callbacks, BatchReport* report) {
  std::function<void()> tell = [&callbacks, number] { callbacks.on_input_gradients(number); };
  kernels::LinearCrossEntropyParams params = ToParams(kind, rows);
  const absl::StatusOr<const void*> hidden_states = Spread(
      kind.holder, rows.hidden_states, rows.tokens * config_.hidden_size, kind.hidden_type, &gathered_);
  if (!hidden_states.ok()) return hidden_states.status();
  params.hidden_states = *hidden_states;
  absl::StatusOr<kernels::Teacher> teacher;
  if (kind.teacher.backend != nullptr) {
    teacher = TeacherOf(kind, rows);
    if (!teacher.ok()) return teacher.status();
    params.teacher = &*teacher;
    params.distillation = kind.teacher.distillation;
  }
  params.on_input_gradients = [](void* context) { (*static_cast<std::function<void()>*>(context))(); };
  params.on_input_gradients_context = &tell;
  kernels::LinearCrossEntropyStats stats;
  const kernels::Status status = kernels::CpuLinearCrossEntropy(params, &stats);
  if (status != kernels::Status::kOk) return KernelError("the fused step", status);
  if (Accumulates(rows) && stats.valid_tokens > 0) Find(kind.gradient).empty = false;
  report->rows_redone += stats.rows_redone;
  return absl::OkStatus();
}

// The teacher of a batch that `kind` says has one.
absl::StatusOr<kernels::Teacher> CpuBackend::TeacherOf(const BatchKey& kind, const ChunkRows& rows) {
  const auto& backend = static_cast<const CpuBackend&>(*kind.teacher.backend);  // of the same device
  kernels::Teacher teacher;
  teacher.hidden = backend.config_.hidden_size;
  teacher.weight_type = backend.config_.weight_type;
  teacher.weight = backend.weights_.data();
  if (backend.config_.bias) teacher.bias = Floats(backend.bias_);
  teacher.logit_scale = backend.config_.logit_scale;
  teacher.softcap = backend.config_.softcap;
  teacher.hidden_type = kind.teacher.hidden_type;
  const absl::StatusOr<const void*> hidden_states =
      Spread(kind.holder, rows.teacher_hidden, rows.tokens * teacher.hidden, teacher.hidden_type,
             &teacher_gathered_);
  if (!hidden_states.ok()) return hidden_states.status();
  teacher.hidden_states = *hidden_states;
  return teacher;
}

// Where losses go that nobody wants.
float* CpuBackend::UnusedLosses(int64_t tokens) {
  unused_losses_.resize(std::max(unused_losses_.size(), static_cast<size_t>(tokens)));
  return unused_losses_.data();
}

kernels::LinearCrossEntropyParams CpuBackend::ToParams(const BatchKey& kind, const ChunkRows& rows) {
  kernels::LinearCrossEntropyParams params;
  params.shard = ShardFor(kind.segments, kind.holder);
  params.tokens = rows.tokens;
  params.vocab = config_.vocab_size;
  params.hidden = config_.hidden_size;
  params.weight_type = config_.weight_type;
  params.weight = weights_.data();
  if (kind.bias == Bias::kUse && config_.bias) params.bias = Floats(bias_);
  params.hidden_type = kind.hidden_type;
  params.labels = rows.labels;
  params.ignore_index = rows.ignore_index;
  params.options = kind.options;
  if (kind.class_weights == ClassWeights::kUse && config_.class_weights != nullptr) {
    params.class_weights = config_.class_weights->data();
  }
  params.token_weights = rows.token_weights;
  params.lse_gradients = rows.lse_gradients;
  params.entropy_gradients = rows.entropy_gradients;
  params.kept_tokens = rows.kept_tokens;
  params.target_lists = rows.target_lists;
  if (rows.target_lists.given()) params.distillation = kind.lists.targets;
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
