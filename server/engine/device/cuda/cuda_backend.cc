#include "server/engine/device/cuda/cuda_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "server/engine/chunk/chunk_options.h"
#include "server/engine/device/cuda/cuda_status.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::SizeOf;
using kernels::cuda::BatchRows;
using kernels::cuda::LabelledRows;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::Path;
using kernels::cuda::Result;
using kernels::cuda::TeacherHead;
using kernels::cuda::TeacherShape;

using Accumulate = ChunkRows::Accumulate;

namespace {

// Into pinned memory, unless the device copies them itself; `to` moves on.
void Stage(const HiddenRows& rows, int64_t bytes, char** to) {
  if (bytes > 0 && !CudaPipeline::CopiesItself(rows, bytes)) {
    if (rows.data != nullptr) {
      std::memcpy(*to, rows.data, static_cast<size_t>(bytes));
    } else {
      Gather(rows.parts, reinterpret_cast<std::byte*>(*to));
    }
  }
  *to += bytes;
}

}  // namespace

// Batches

int64_t CudaBackend::RowsPerBatch(const BatchKey& kind) const {
  const CudaPipeline::Capacity& capacity = device_->pipeline.capacity();
  // Tile by tile, the step gains nothing by more rows.
  const bool taught = kind.teacher.backend != nullptr;
  const TeacherShape teacher = ShapeOf(kind.teacher);
  // A teacher that there is no room for is refused when its batch is to be started.
  if (taught && BytesForTeacher(teacher) > device_->workspace_bytes) return 1;
  const TeacherShape* const told = taught ? &teacher : nullptr;
  const int64_t best =
      InSegments(kind) ? step_.BestBatchRows(shard_.For(kind.segments), told) : step_.BestBatchRows(told);
  // With kept tokens, dW's entries are read and written once for each batch: the more rows, the better.
  const bool kept = kind.lists.use == ChunkLists::Use::kKept;
  int64_t rows = kept ? capacity.tokens : std::min(best, capacity.tokens);
  // More than there is room for would not be held at all.
  if (kind.holds && holds_.has_value() && holds_->rows() > 0) rows = std::min(rows, holds_->rows());
  int64_t row_bytes = config_.hidden_size * SizeOf(kind.hidden_type);
  if (taught) row_bytes += kind.teacher.hidden_size * SizeOf(kind.teacher.hidden_type);
  rows = std::min(rows, capacity.hidden_bytes / row_bytes);
  // Whose lists are no longer on average; a chunk of its own always fits.
  if (kind.lists.size_class > 0) rows = std::min(rows, kMostListedTokens / kind.lists.size_class);
  if (HasInputGradient(kind.mode)) {
    rows = std::min(rows, capacity.dx_bytes / (config_.hidden_size * SizeOf(kind.dx_type)));
  }
  return std::max<int64_t>(rows, 1);
}

bool CudaBackend::HasRoomForList(int64_t tokens) const { return step_.HasRoomForList(tokens); }

TeacherHead CudaBackend::AsTeacher() const {
  TeacherHead teacher;
  teacher.head.hidden = config_.hidden_size;
  teacher.head.weight_type = config_.weight_type;
  teacher.head.weight = weights_.data();
  teacher.head.logit_scale = config_.logit_scale;
  teacher.head.softcap = config_.softcap;
  teacher.weight_largest = static_cast<const float*>(weight_largest_.data());
  teacher.head.bias = static_cast<const float*>(bias_.data());
  teacher.bias_largest = static_cast<const float*>(bias_largest_.data());
  teacher.path = path_;
  teacher.library = device_->library.get();
  return teacher;
}

// Where the path is not this one's, a batch has a few rows more or less than the workspace likes best.
TeacherShape CudaBackend::ShapeOf(const TeacherKind& teacher) const {
  return {teacher.hidden_size, teacher.weight_type,
          teacher.weight_type == DataType::kFloat32 ? Path::kPortable : path_};
}

// For a step of each kind that there may be.
int64_t CudaBackend::BytesForTeacher(const TeacherShape& teacher) const {
  int64_t most = shard_.whole() ? LinearCrossEntropy::WorkspaceBytes(shape_, path_, teacher, 1) : 0;
  if (path_ != Path::kHopper || teacher.path != Path::kHopper) return most;
  for (const kernels::Segments segments : {kernels::Segments::kOfRanks, kernels::Segments::kFixed}) {
    const kernels::Shard shard = shard_.For(segments);
    const bool used =
        shard.segments() > 1 && LinearCrossEntropy::RowsWithin(shape_, shard, device_->workspace_bytes) > 0;
    if (used) most = std::max(most, LinearCrossEntropy::WorkspaceBytes(shape_, shard, 1, &teacher));
  }
  return most;
}

absl::Status CudaBackend::PrepareTeacher(const HeadBackend& backend) {
  const TeacherHead teacher = static_cast<const CudaBackend&>(backend).AsTeacher();  // of the same device
  const TeacherShape shape = teacher.shape();
  if (std::find(prepared_.begin(), prepared_.end(), shape) != prepared_.end()) return absl::OkStatus();
  if (const int64_t bytes = BytesForTeacher(shape); bytes > device_->workspace_bytes) {
    return NoRoomForTeacher(config_, bytes, device_->workspace_bytes);
  }
  Result result(cudaSetDevice(device_->index), "cudaSetDevice");
  if (result.ok()) {
    const MutexLock lock(device_->workspace_turn);
    // Behind every batch that was started: they use the workspace and dW in this stream alone.
    result = step_.LoadTeacherProducts(weights_.data(), static_cast<float*>(own_.dw.data()), teacher,
                                       device_->pipeline.computing());
  }
  if (!result.ok()) return DeviceFailed(result);
  prepared_.push_back(shape);
  return absl::OkStatus();
}

void CudaBackend::StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks,
                             BatchCallbacks callbacks) {
  CudaPipeline& pipeline = device_->pipeline;
  CudaSlot& slot = pipeline.Begin(kind, chunks, config_.hidden_size, std::move(callbacks));
  if (!pipeline.failure().ok()) return;
  if (const Result result = Enqueue(kind, slot); !result.ok()) pipeline.Fail(result);
}

Result CudaBackend::Enqueue(const BatchKey& kind, CudaSlot& slot) {
  CudaPipeline& pipeline = device_->pipeline;
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  TeacherHead teacher;
  if (kind.teacher.backend != nullptr) {
    teacher = static_cast<const CudaBackend&>(*kind.teacher.backend).AsTeacher();  // of the same device
    teacher.head.hidden_type = kind.teacher.hidden_type;
    teacher.head.hidden_states = static_cast<const char*>(slot.in.data()) + slot.layout.teacher_hidden;
  }
  const TeacherShape teacher_shape = teacher.shape();
  const kernels::Shard shard = shard_.For(kind.segments, kind.holder);
  const kernels::Shard* const segments = InSegments(kind) ? &shard : nullptr;
  const BatchRows rows =
      FillPinned(slot, segments, kind.teacher.backend == nullptr ? nullptr : &teacher_shape);
  std::vector<int32_t> held;
  if (slot.extras.held_rows) {
    held = FindRows(kind, slot, rows);
    std::copy(held.begin(), held.end(),
              reinterpret_cast<int32_t*>(static_cast<char*>(slot.pinned_in.data()) + slot.layout.held_rows));
  }
  int64_t tokens = 0;
  for (const ChunkRows& chunk : slot.chunks) tokens += chunk.tokens;
  // Rows that are ignored get zeros.
  LOSSD_CUDA_PASS_ON(pipeline.CopyIn(slot, rows.rows == tokens ? slot.layout.dx : slot.layout.out_bytes));
  LOSSD_CUDA_PASS_ON(RefreshSums(kind, shard));
  LinearCrossEntropy::Batch batch = Describe(kind, slot, rows);
  batch.shard = segments;
  batch.shard_streams = &device_->shard_streams;
  if (kind.teacher.backend != nullptr) {
    batch.teacher = &teacher;
    batch.distillation = kind.teacher.distillation;
  }
  if (batch.targets.offsets != nullptr) batch.distillation = kind.lists.targets;
  UseHold(kind, slot, rows, held, &batch);
  {
    const MutexLock lock(device_->workspace_turn);
    LOSSD_CUDA_PASS_ON(step_.Run(batch, pipeline.computing(), slot.ready.get()));
  }
  if (batch.weight_gradient != kernels::WeightGradient::kNone) NoteAdded(kind);
  return pipeline.CopyOut(slot);
}

void CudaBackend::NoteAdded(const BatchKey& kind) {
  CudaGradient& gradient = Find(kind.gradient);
  gradient.empty = false;
  // Such batches leave nothing of smoothing beside dW.
  if (kind.teacher.backend != nullptr || kind.entropy_gradients) return;
  if (kernels::cuda::SmoothingOf(kind.options) != kernels::cuda::Smoothing::kRankOne) return;
  gradient.smoothings[UsesClassWeights(kind) ? kWeighted : kUniform].empty = false;
}

// Hidden states of all chunks, each where it belongs, and arrays of the valid rows.
BatchRows CudaBackend::FillPinned(const CudaSlot& slot, const kernels::Shard* shard,
                                  const TeacherShape* teacher) const {
  auto* in = static_cast<char*>(slot.pinned_in.data());
  const SlotLayout& layout = slot.layout;
  const bool adds = slot.adds;
  std::vector<LabelledRows> parts;
  parts.reserve(slot.chunks.size());
  char* hidden_states = in + layout.hidden_states;
  char* teacher_hidden = in + layout.teacher_hidden;
  for (const ChunkRows& chunk : slot.chunks) {
    if (slot.is_held) {
      Stage(chunk.hidden_states, chunk.tokens * slot.hidden_row_bytes, &hidden_states);
      Stage(chunk.teacher_hidden, chunk.tokens * slot.teacher_row_bytes, &teacher_hidden);
    }
    // Where no chunk counts, dW is left alone, and there is nothing to tell apart.
    const float share = adds && chunk.accumulate == Accumulate::kNo ? 0.0f : 1.0f;
    parts.push_back({.labels = chunk.labels,
                     .tokens = chunk.tokens,
                     .ignore_index = chunk.ignore_index,
                     .gradient_scale = chunk.gradient_scale,
                     .share = share,
                     .z_gradient_scale = chunk.z_gradient_scale,
                     .token_weights = chunk.token_weights,
                     .lse_gradients = chunk.lse_gradients,
                     .entropy_gradients = chunk.entropy_gradients,
                     .kept_tokens = chunk.kept_tokens,
                     .target_lists = chunk.target_lists,
                     .wants_unweighted = chunk.returns.unweighted()});
  }
  BatchRows rows = shard == nullptr ? step_.Arrange(parts, teacher) : step_.Arrange(parts, *shard, teacher);
  const auto bytes = static_cast<size_t>(rows.rows) * sizeof(int32_t);
  std::memcpy(in + layout.batch_rows, rows.batch_rows.data(), bytes);
  std::memcpy(in + layout.labels, rows.labels.data(), bytes);
  std::memcpy(in + layout.gradient_scales, rows.gradient_scales.data(), bytes);
  std::memcpy(in + layout.by_label, rows.by_label.data(), bytes);
  const auto fill = [in, bytes](int64_t offset, const std::vector<float>& values) {
    if (!values.empty()) std::memcpy(in + offset, values.data(), bytes);
  };
  fill(layout.shares, rows.shares);
  fill(layout.z_gradient_scales, rows.z_gradient_scales);
  fill(layout.token_weights, rows.token_weights);
  fill(layout.lse_gradients, rows.lse_gradients);
  fill(layout.entropy_gradients, rows.entropy_gradients);
  FillLists(slot, rows);
  return rows;
}

void CudaBackend::FillLists(const CudaSlot& slot, const BatchRows& rows) {
  auto* in = static_cast<char*>(slot.pinned_in.data());
  const auto fill = [in](int64_t offset, const auto& values) {
    if (!values.empty()) std::memcpy(in + offset, values.data(), values.size() * sizeof(values[0]));
  };
  const SlotLayout& layout = slot.layout;
  const kernels::cuda::TargetRows& targets = rows.targets;
  fill(layout.list_offsets, targets.offsets);
  fill(layout.list_tokens, targets.tokens);
  fill(layout.target_probabilities, targets.probabilities);
  const kernels::cuda::KeptRows& kept = rows.kept;
  fill(layout.list_offsets, kept.offsets);
  fill(layout.list_tokens, kept.tokens);
  fill(layout.kept_by_token, kept.by_token);
  if (!kept.offsets.empty()) fill(layout.kept_token_starts, kept.token_starts);
}

void CudaBackend::DescribeLists(const CudaSlot& slot, const BatchRows& rows,
                                LinearCrossEntropy::Batch* step) {
  const SlotLayout& layout = slot.layout;
  auto* const in = static_cast<char*>(slot.in.data());
  const auto array = [in](int64_t offset) { return reinterpret_cast<const int32_t*>(in + offset); };
  if (!rows.targets.offsets.empty()) {
    step->targets = {.offsets = array(layout.list_offsets),
                     .tokens = array(layout.list_tokens),
                     .probabilities = reinterpret_cast<const float*>(in + layout.target_probabilities),
                     .logits = reinterpret_cast<float*>(in + layout.target_logits)};
  }
  if (rows.kept.offsets.empty()) return;
  step->kept = {.offsets = array(layout.list_offsets),
                .tokens = array(layout.list_tokens),
                .by_token = array(layout.kept_by_token),
                .token_starts = array(layout.kept_token_starts),
                .tiles = rows.kept.tiles};
}

LinearCrossEntropy::Batch CudaBackend::Describe(const BatchKey& kind, const CudaSlot& slot,
                                                const BatchRows& rows) {
  const auto* in = static_cast<const char*>(slot.in.data());
  auto* out = static_cast<char*>(slot.out.data());
  const SlotLayout& layout = slot.layout;
  LinearCrossEntropy::Batch step;
  step.rows = rows.rows;
  step.hidden_states = in + layout.hidden_states;
  step.hidden_type = kind.hidden_type;
  step.batch_rows = reinterpret_cast<const int32_t*>(in + layout.batch_rows);
  step.labels = reinterpret_cast<const int32_t*>(in + layout.labels);
  step.gradient_scales = reinterpret_cast<const float*>(in + layout.gradient_scales);
  step.by_label = reinterpret_cast<const int32_t*>(in + layout.by_label);
  step.weight = weights_.data();
  step.weight_largest = static_cast<const float*>(weight_largest_.data());
  if (UsesBias(kind)) {
    step.bias = static_cast<const float*>(bias_.data());
    step.bias_largest = static_cast<const float*>(bias_largest_.data());
  }
  step.losses = reinterpret_cast<float*>(out + layout.losses);
  step.rows_redone = reinterpret_cast<int32_t*>(out + layout.rows_redone);
  step.dx_type = kind.dx_type;
  step.dx = HasInputGradient(kind.mode) ? out + layout.dx : nullptr;
  DescribeLoss(kind, slot, rows, &step);
  if (slot.adds && rows.rows > 0 && !frozen()) {
    CudaGradient& gradient = Find(kind.gradient);
    const CudaGradient::Smoothing& smoothing =
        gradient.smoothings[UsesClassWeights(kind) ? kWeighted : kUniform];
    step.weight_gradient =
        gradient.empty ? kernels::WeightGradient::kOverwrite : kernels::WeightGradient::kAccumulate;
    step.dw = static_cast<float*>(gradient.dw.data());
    // Rows without the bias have it too: what they overwrite, they clear.
    step.db = static_cast<float*>(gradient.db.data());
    step.smoothing_store =
        smoothing.empty ? kernels::WeightGradient::kOverwrite : kernels::WeightGradient::kAccumulate;
    step.smoothing_gradient = static_cast<float*>(smoothing.t.data());
  }
  return step;
}

void CudaBackend::DescribeLoss(const BatchKey& kind, const CudaSlot& slot, const BatchRows& rows,
                               LinearCrossEntropy::Batch* step) const {
  const auto* in = static_cast<const char*>(slot.in.data());
  const SlotLayout& layout = slot.layout;
  const auto array = [in](int64_t offset, const std::vector<float>& values) {
    return values.empty() ? nullptr : reinterpret_cast<const float*>(in + offset);
  };
  step->shares = array(layout.shares, rows.shares);
  step->z_gradient_scales = array(layout.z_gradient_scales, rows.z_gradient_scales);
  step->token_weights = array(layout.token_weights, rows.token_weights);
  step->lse_gradients = array(layout.lse_gradients, rows.lse_gradients);
  step->entropy_gradients = array(layout.entropy_gradients, rows.entropy_gradients);
  DescribeLists(slot, rows, step);
  step->returns = ReturnsIn(slot.out.data(), layout, slot.extras.returns);
  step->options = kind.options;
  const bool weighted = UsesClassWeights(kind);
  if (weighted) {
    step->classes.weights = static_cast<const float*>(class_weights_.data());
    step->classes.sum = class_weight_sum_;
    step->classes.largest = class_weight_largest_;
  }
  const size_t which = weighted ? kWeighted : kUniform;
  step->classes.vocabulary_sum = static_cast<const float*>(vocabulary_sums_[which].data());
  step->classes.bias_sum = static_cast<const double*>(bias_sums_[which].data());
}

}  // namespace lossd::engine
