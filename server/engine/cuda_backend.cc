#include "server/engine/cuda_backend.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/cuda/bias.h"
#include "kernels/cuda/smoothing.h"
#include "server/engine/cuda_status.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::SizeOf;
using kernels::cuda::BatchRows;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::LabelledRows;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::PaddedHidden;
using kernels::cuda::Path;
using kernels::cuda::Result;

using Accumulate = ChunkRows::Accumulate;

CudaBackend::CudaBackend(HeadConfig config, SharedCuda* device, Path path)
    : config_(std::move(config)),
      device_(device),
      padded_hidden_(PaddedHidden(config_.hidden_size)),
      shape_{config_.vocab_size, config_.hidden_size, config_.weight_type},
      step_(shape_, path, LinearCrossEntropy::RowsWithin(shape_, path, device->workspace_bytes),
            device->workspace.data(), device->library.get()) {}

int64_t CudaBackend::WeightRowBytes() const { return padded_hidden_ * SizeOf(config_.weight_type); }
int64_t CudaBackend::GradientRowBytes() const { return padded_hidden_ * static_cast<int64_t>(sizeof(float)); }

Result CudaBackend::Allocate() {
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(config_.vocab_size * WeightRowBytes(), &weights_));
  if (!frozen()) {
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(config_.vocab_size * GradientRowBytes(), &gradient_));
  }
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(sizeof(float), &weight_largest_));
  // The padding stays zero.
  LOSSD_CUDA_TRY(cudaMemset(weights_.data(), 0, static_cast<size_t>(weights_.bytes())));
  LOSSD_CUDA_PASS_ON(AllocateBias());
  LOSSD_CUDA_PASS_ON(AllocateSmoothing());
  // The device's own streams do not wait for the one that this went to.
  LOSSD_CUDA_TRY(cudaStreamSynchronize(nullptr));
  cudaStream_t stream = device_->pipeline.computing();
  {
    const std::lock_guard lock(device_->workspace_turn);
    LOSSD_CUDA_PASS_ON(
        step_.LoadLibraryProducts(weights_.data(), static_cast<float*>(gradient_.data()), stream));
  }
  LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
  return {};
}

Result CudaBackend::AllocateBias() {
  if (!config_.bias) return {};
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(config_.bias_bytes(), &bias_));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(sizeof(float), &bias_largest_));
  if (!frozen()) LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(config_.bias_gradient_bytes(), &bias_gradient_));
  for (size_t i = 0; i < smoothings_.size(); ++i) {
    if (i == kWeighted && config_.class_weights == nullptr) continue;
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(sizeof(double), &smoothings_[i].bias_sum));
  }
  return {};
}

Result CudaBackend::AllocateSmoothing() {
  if (const std::vector<float>* weights = config_.class_weights.get(); weights != nullptr) {
    class_weight_sum_ = std::accumulate(weights->begin(), weights->end(), 0.0);
    class_weight_largest_ = *std::max_element(weights->begin(), weights->end());
    const auto bytes = static_cast<int64_t>(weights->size() * sizeof(float));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, &class_weights_));
    LOSSD_CUDA_TRY(cudaMemcpy(class_weights_.data(), weights->data(), static_cast<size_t>(bytes),
                              cudaMemcpyHostToDevice));
  }
  for (size_t i = 0; i < smoothings_.size(); ++i) {
    if (i == kWeighted && config_.class_weights == nullptr) continue;
    Smoothing& smoothing = smoothings_[i];
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(GradientRowBytes(), &smoothing.vocabulary_sum));
    LOSSD_CUDA_TRY(cudaMemset(smoothing.vocabulary_sum.data(), 0, static_cast<size_t>(GradientRowBytes())));
    if (!frozen()) LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(GradientRowBytes(), &smoothing.gradient));
  }
  return {};
}

MemoryPlan CudaBackend::PlanMemory(const HeadConfig& config) {
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  const int64_t padded = PaddedHidden(config.hidden_size);
  const int64_t elements = config.vocab_size * padded;
  const bool weighted = config.class_weights != nullptr;
  const int64_t vectors = (weighted ? 2 : 1) * padded * kFloat;
  const int64_t shared = (weighted ? config.vocab_size * kFloat : 0) + config.bias_bytes();
  MemoryPlan plan = {{"weights", elements * SizeOf(config.weight_type) + shared + vectors}};
  if (config.weight_gradients == WeightGradients::kAccumulated) {
    plan.push_back({"gradient", elements * kFloat + vectors + config.bias_gradient_bytes()});
  }
  return plan;
}

MemoryPlan CudaBackend::MemoryReport() const {
  int64_t weights = weights_.bytes() + class_weights_.bytes() + bias_.bytes();
  int64_t gradient = gradient_.bytes() + bias_gradient_.bytes();
  for (const Smoothing& smoothing : smoothings_) {
    weights += smoothing.vocabulary_sum.bytes();
    gradient += smoothing.gradient.bytes();
  }
  MemoryPlan plan = {{"weights", weights}};
  if (!frozen()) plan.push_back({"gradient", gradient});
  return plan;
}

// --- Weights and gradient
// ---------------------------------------------------------------------------------------

absl::Status CudaBackend::PublishWeights(WeightBuffers staged) { return DeviceFailed(Publish(staged)); }

Result CudaBackend::Publish(const WeightBuffers& staged) {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  const auto row_bytes = static_cast<size_t>(config_.hidden_size * SizeOf(config_.weight_type));
  cudaStream_t stream = device_->pipeline.computing();  // after every batch that was given the old weights
  LOSSD_CUDA_TRY(cudaMemcpy2DAsync(weights_.data(), static_cast<size_t>(WeightRowBytes()),
                                   staged.weights.data(), row_bytes, row_bytes,
                                   static_cast<size_t>(config_.vocab_size), cudaMemcpyHostToDevice, stream));
  LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(config_.weight_type, weights_.data(),
                                                     config_.vocab_size * padded_hidden_,
                                                     static_cast<float*>(weight_largest_.data()), stream));
  for (size_t i = 0; i < smoothings_.size(); ++i) {
    auto* sum = static_cast<float*>(smoothings_[i].vocabulary_sum.data());
    if (sum == nullptr) continue;
    const auto* weights = i == kWeighted ? static_cast<const float*>(class_weights_.data()) : nullptr;
    LOSSD_CUDA_PASS_ON(kernels::cuda::SumVocabulary(config_.weight_type, weights_.data(), config_.vocab_size,
                                                    padded_hidden_, weights, sum, stream));
  }
  if (config_.bias) LOSSD_CUDA_PASS_ON(PublishBias(staged.bias, stream));
  LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
  return {};
}

Result CudaBackend::PublishBias(const HostBuffer& staged, cudaStream_t stream) {
  LOSSD_CUDA_TRY(cudaMemcpyAsync(bias_.data(), staged.data(), static_cast<size_t>(config_.bias_bytes()),
                                 cudaMemcpyHostToDevice, stream));
  const auto* bias = static_cast<const float*>(bias_.data());
  LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(DataType::kFloat32, bias, config_.vocab_size,
                                                     static_cast<float*>(bias_largest_.data()), stream));
  for (size_t i = 0; i < smoothings_.size(); ++i) {
    auto* sum = static_cast<double*>(smoothings_[i].bias_sum.data());
    if (sum == nullptr) continue;
    const auto* weights = i == kWeighted ? static_cast<const float*>(class_weights_.data()) : nullptr;
    LOSSD_CUDA_PASS_ON(kernels::cuda::SumBias(bias, config_.vocab_size, weights, sum, stream));
  }
  return {};
}

absl::Status CudaBackend::ReadWeightRows(int64_t first_row, int64_t rows, DataType type, void* out) {
  const int64_t row_bytes = config_.hidden_size * SizeOf(config_.weight_type);
  std::vector<char> narrow(static_cast<size_t>(rows * row_bytes));
  const Result result = ReadRows(weights_, WeightRowBytes(), first_row, rows, row_bytes, narrow.data());
  if (!result.ok()) return DeviceFailed(result);
  kernels::Convert(config_.weight_type, narrow.data(), type, out, rows * config_.hidden_size);
  return absl::OkStatus();
}

absl::Status CudaBackend::ReadBias(int64_t first_row, int64_t rows, float* out) {
  return DeviceFailed(ReadFloats(bias_, first_row, rows, out));
}

absl::Status CudaBackend::ReadBiasGradient(int64_t first_row, int64_t rows, float* out) {
  if (gradient_empty_) {
    std::fill_n(out, rows, 0.0f);
    return absl::OkStatus();
  }
  return DeviceFailed(ReadFloats(bias_gradient_, first_row, rows, out));
}

absl::Status CudaBackend::ReadGradientRows(int64_t first_row, int64_t rows, float* out) {
  if (gradient_empty_) {
    std::fill_n(out, rows * config_.hidden_size, 0.0f);
    return absl::OkStatus();
  }
  const int64_t row_bytes = config_.hidden_size * static_cast<int64_t>(sizeof(float));
  Result result = ReadRows(gradient_, GradientRowBytes(), first_row, rows, row_bytes, out);
  if (result.ok()) result = SubtractSmoothing(first_row, rows, out);
  return DeviceFailed(result);
}

Result CudaBackend::SubtractSmoothing(int64_t first_row, int64_t rows, float* out) const {
  const int64_t hidden = config_.hidden_size;
  for (size_t i = 0; i < smoothings_.size(); ++i) {
    if (smoothings_[i].gradient_empty) continue;
    std::vector<float> t(static_cast<size_t>(hidden));
    const auto bytes = static_cast<int64_t>(t.size() * sizeof(float));
    LOSSD_CUDA_PASS_ON(ReadRows(smoothings_[i].gradient, bytes, 0, 1, bytes, t.data()));
    for (int64_t row = 0; row < rows; ++row) {
      const float weight =
          i == kWeighted ? (*config_.class_weights)[static_cast<size_t>(first_row + row)] : 1.0f;
      float* of_row = out + row * hidden;
      for (int64_t h = 0; h < hidden; ++h) of_row[h] -= weight * t[static_cast<size_t>(h)];
    }
  }
  return {};
}

void CudaBackend::ResetGradient() {
  gradient_empty_ = true;
  for (Smoothing& smoothing : smoothings_) smoothing.gradient_empty = true;
}

Result CudaBackend::ReadFloats(const DeviceBuffer& buffer, int64_t first, int64_t count, float* out) const {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  cudaStream_t stream = device_->pipeline.computing();
  LOSSD_CUDA_TRY(cudaMemcpyAsync(out, static_cast<const float*>(buffer.data()) + first,
                                 static_cast<size_t>(count) * sizeof(float), cudaMemcpyDeviceToHost, stream));
  LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
  return {};
}

Result CudaBackend::ReadRows(const DeviceBuffer& buffer, int64_t stride_bytes, int64_t first_row,
                             int64_t rows, int64_t row_bytes, void* out) const {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  const char* from = static_cast<const char*>(buffer.data()) + first_row * stride_bytes;
  cudaStream_t stream = device_->pipeline.computing();
  LOSSD_CUDA_TRY(cudaMemcpy2DAsync(out, static_cast<size_t>(row_bytes), from,
                                   static_cast<size_t>(stride_bytes), static_cast<size_t>(row_bytes),
                                   static_cast<size_t>(rows), cudaMemcpyDeviceToHost, stream));
  LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
  return {};
}

// --- Batches
// ----------------------------------------------------------------------------------------------------

int64_t CudaBackend::RowsPerBatch(const RowKind& kind) const {
  const CudaPipeline::Capacity& capacity = device_->pipeline.capacity();
  // Tile by tile, the step gains nothing by more rows.
  int64_t rows = std::min(step_.BestBatchRows(), capacity.tokens);
  rows = std::min(rows, capacity.hidden_bytes / (config_.hidden_size * SizeOf(kind.hidden_type)));
  if (kind.mode == ComputeMode::kLossAndGradients) {
    rows = std::min(rows, capacity.dx_bytes / (config_.hidden_size * SizeOf(kind.dx_type)));
  }
  return std::max<int64_t>(rows, 1);
}

void CudaBackend::StartBatch(const RowKind& kind, std::span<const ChunkRows> chunks,
                             BatchCallbacks callbacks) {
  CudaPipeline& pipeline = device_->pipeline;
  const CudaSlot& slot = pipeline.Begin(kind, chunks, config_.hidden_size, std::move(callbacks));
  if (!pipeline.failure().ok()) return;
  if (const Result result = Enqueue(kind, slot); !result.ok()) pipeline.Fail(result);
}

Result CudaBackend::Enqueue(const RowKind& kind, const CudaSlot& slot) {
  CudaPipeline& pipeline = device_->pipeline;
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  const BatchRows rows = FillPinned(slot);
  int64_t tokens = 0;
  for (const ChunkRows& chunk : slot.chunks) tokens += chunk.tokens;
  // Rows that are ignored get zeros.
  LOSSD_CUDA_PASS_ON(pipeline.CopyIn(slot, rows.rows == tokens ? slot.layout.dx : slot.layout.out_bytes));
  const LinearCrossEntropy::Batch batch = Describe(kind, slot, rows);
  {
    const std::lock_guard lock(device_->workspace_turn);
    LOSSD_CUDA_PASS_ON(step_.Run(batch, pipeline.computing(), slot.ready.get()));
  }
  if (batch.weight_gradient != kernels::WeightGradient::kNone) NoteAdded(kind);
  return pipeline.CopyOut(slot);
}

void CudaBackend::NoteAdded(const RowKind& kind) {
  gradient_empty_ = false;
  if (kernels::cuda::SmoothingOf(kind.options) != kernels::cuda::Smoothing::kRankOne) return;
  smoothings_[UsesClassWeights(kind) ? kWeighted : kUniform].gradient_empty = false;
}

// Hidden states of all chunks, each where it belongs, and arrays of the valid rows.
BatchRows CudaBackend::FillPinned(const CudaSlot& slot) const {
  auto* in = static_cast<char*>(slot.pinned_in.data());
  const SlotLayout& layout = slot.layout;
  const bool adds = slot.adds;
  std::vector<LabelledRows> parts;
  parts.reserve(slot.chunks.size());
  char* hidden_states = in + layout.hidden_states;
  for (const ChunkRows& chunk : slot.chunks) {
    const int64_t bytes = chunk.tokens * slot.hidden_row_bytes;
    if (!CudaPipeline::CopiesItself(slot, chunk)) {
      if (chunk.hidden_states != nullptr) {
        std::memcpy(hidden_states, chunk.hidden_states, static_cast<size_t>(bytes));
      } else {
        Gather(chunk.hidden_parts, reinterpret_cast<std::byte*>(hidden_states));
      }
    }
    hidden_states += bytes;
    // Where no chunk counts, dW is left alone, and there is nothing to tell apart.
    const float share = adds && chunk.accumulate == Accumulate::kNo ? 0.0f : 1.0f;
    parts.push_back({.labels = chunk.labels,
                     .tokens = chunk.tokens,
                     .ignore_index = chunk.ignore_index,
                     .gradient_scale = chunk.gradient_scale,
                     .share = share,
                     .z_gradient_scale = chunk.z_gradient_scale,
                     .token_weights = chunk.token_weights,
                     .lse_gradients = chunk.lse_gradients});
  }
  BatchRows rows = step_.Arrange(parts);
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
  return rows;
}

LinearCrossEntropy::Batch CudaBackend::Describe(const RowKind& kind, const CudaSlot& slot,
                                                const BatchRows& rows) const {
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
  step.dx = kind.mode == ComputeMode::kLossOnly ? nullptr : out + layout.dx;
  DescribeLoss(kind, slot, rows, &step);
  if (slot.adds && rows.rows > 0 && !frozen()) {
    const Smoothing& smoothing = smoothings_[UsesClassWeights(kind) ? kWeighted : kUniform];
    step.weight_gradient =
        gradient_empty_ ? kernels::WeightGradient::kOverwrite : kernels::WeightGradient::kAccumulate;
    step.dw = static_cast<float*>(gradient_.data());
    // Of rows without the bias too: what they overwrite, they clear.
    step.db = static_cast<float*>(bias_gradient_.data());
    step.smoothing_store =
        smoothing.gradient_empty ? kernels::WeightGradient::kOverwrite : kernels::WeightGradient::kAccumulate;
    step.smoothing_gradient = static_cast<float*>(smoothing.gradient.data());
  }
  return step;
}

void CudaBackend::DescribeLoss(const RowKind& kind, const CudaSlot& slot, const BatchRows& rows,
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
  step->returns = ReturnsIn(slot.out.data(), layout, slot.extras.returns);
  step->options = kind.options;
  const bool weighted = UsesClassWeights(kind);
  if (weighted) {
    step->classes.weights = static_cast<const float*>(class_weights_.data());
    step->classes.sum = class_weight_sum_;
    step->classes.largest = class_weight_largest_;
  }
  const Smoothing& smoothing = smoothings_[weighted ? kWeighted : kUniform];
  step->classes.vocabulary_sum = static_cast<const float*>(smoothing.vocabulary_sum.data());
  step->classes.bias_sum = static_cast<const double*>(smoothing.bias_sum.data());
}

}  // namespace lossd::engine
