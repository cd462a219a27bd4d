// The memory of a head on a CUDA device.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>
#include <vector>

#include "server/engine/device/cuda/cuda_backend.h"

namespace lossd::engine {

using kernels::SizeOf;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::PaddedHidden;
using kernels::cuda::Path;
using kernels::cuda::Result;

namespace {

constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
constexpr MemoryPlace kDevice = MemoryPlace::kDevice;

// Zeros: what the optimizer begins with, and padding stays so.
Result CreateZeros(int64_t bytes, DeviceBuffer* buffer) {
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, buffer));
  LOSSD_CUDA_TRY(cudaMemset(buffer->data(), 0, static_cast<size_t>(bytes)));
  return {};
}

}  // namespace

Result CudaGradient::Create(const HeadConfig& config, CudaGradient* gradient) {
  static std::atomic<int64_t> last_number = 0;
  gradient->number = ++last_number;
  const int64_t row_bytes = PaddedHidden(config.hidden_size) * static_cast<int64_t>(sizeof(float));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(config.vocab_size * row_bytes, &gradient->dw));
  if (config.bias) LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(config.bias_gradient_bytes(), &gradient->db));
  const size_t vectors = config.class_weights == nullptr ? 1 : 2;
  for (size_t i = 0; i < vectors; ++i) {
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(row_bytes, &gradient->smoothings[i].t));
  }
  return {};
}

int64_t CudaGradient::PlanBytes(const HeadConfig& config) {
  const int64_t rows = config.vocab_size + (config.class_weights == nullptr ? 1 : 2);
  return rows * PaddedHidden(config.hidden_size) * static_cast<int64_t>(sizeof(float)) +
         config.bias_gradient_bytes();
}

int64_t CudaGradient::bytes() const {
  int64_t bytes = dw.bytes() + db.bytes();
  for (const Smoothing& smoothing : smoothings) bytes += smoothing.t.bytes();
  return bytes;
}

CudaBackend::CudaBackend(HeadConfig config, const HeadShard& shard, SharedCuda* device, Path path)
    : config_(std::move(config)),
      shard_(shard),
      device_(device),
      path_(path),
      padded_hidden_(PaddedHidden(config_.hidden_size)),
      shape_{config_.vocab_size, config_.hidden_size, config_.weight_type},
      step_(shape_, path, LinearCrossEntropy::RowsWithin(shape_, path, device->workspace_bytes),
            device->workspace.data(), device->library.get(), device->workspace_bytes),
      stepped_(shard_.stepped()) {}

Result CudaBackend::Allocate() {
  LOSSD_CUDA_PASS_ON(CreateZeros(config_.vocab_size * WeightRowBytes(), &weights_));
  if (!frozen()) LOSSD_CUDA_PASS_ON(CudaGradient::Create(config_, &own_));
  LOSSD_CUDA_PASS_ON(CreateZeros(sizeof(float), &weight_largest_));
  LOSSD_CUDA_PASS_ON(AllocateBias());
  LOSSD_CUDA_PASS_ON(AllocateOptimizer());
  LOSSD_CUDA_PASS_ON(AllocateSlices());
  LOSSD_CUDA_PASS_ON(AllocateSmoothing());
  LOSSD_CUDA_PASS_ON(AllocateHold());
  // The device's own streams do not wait for the one that this went to.
  LOSSD_CUDA_TRY(cudaStreamSynchronize(nullptr));
  cudaStream_t stream = device_->pipeline.computing();
  {
    const MutexLock lock(device_->workspace_turn);
    LOSSD_CUDA_PASS_ON(
        step_.LoadLibraryProducts(weights_.data(), static_cast<float*>(own_.dw.data()), stream));
  }
  LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
  return {};
}

// A communicator may live on for other heads.
CudaBackend::~CudaBackend() {
  if (copies_ != nullptr) (void)cudaStreamSynchronize(copies_->stream.get());
  if (const std::shared_ptr<PeerGradients> peers = peers_.lock(); peers != nullptr) peers->Close();
}

Result CudaBackend::AllocateBias() {
  if (!config_.bias) return {};
  LOSSD_CUDA_PASS_ON(CreateZeros(config_.bias_bytes(), &bias_));
  LOSSD_CUDA_PASS_ON(CreateZeros(sizeof(float), &bias_largest_));
  for (size_t i = 0; i < bias_sums_.size(); ++i) {
    if (i == kWeighted && config_.class_weights == nullptr) continue;
    LOSSD_CUDA_PASS_ON(CreateZeros(kernels::kFixedSegments * sizeof(double), &bias_sums_[i]));
  }
  return {};
}

Result CudaBackend::AllocateOptimizer() {
  const int64_t matrix = stepped_.count * GradientRowBytes();
  const int64_t bias = stepped_.count * kFloat;
  if (config_.master_weights) LOSSD_CUDA_PASS_ON(CreateZeros(matrix, &master_));
  for (int i = 0; i < config_.optimizer.moments(); ++i) {
    const auto place = static_cast<size_t>(i);
    LOSSD_CUDA_PASS_ON(CreateZeros(matrix, &moments_[place]));
    if (config_.bias) LOSSD_CUDA_PASS_ON(CreateZeros(bias, &bias_moments_[place]));
  }
  if (config_.optimizer.kind == OptimizerKind::kNone) return {};
  copies_ = std::make_shared<StateCopies>();
  copies_->device = device_->index;
  LOSSD_CUDA_PASS_ON(kernels::cuda::Stream::Create(&copies_->stream));
  return kernels::cuda::Event::Create(&copies_->done);
}

// Nothing of this is left for later: a replica that had no memory then would keep all of them waiting.
Result CudaBackend::AllocateSlices() {
  if (!over_replicas()) return {};
  if (!frozen()) {
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(stepped_.count * GradientRowBytes(), &sum_.dw));
    if (config_.bias) LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(stepped_.count * kFloat, &sum_.db));
  }
  const int32_t pieces = GatheredPieces();
  LOSSD_CUDA_PASS_ON(CreateZeros(int64_t{shard_.replicas} * pieces * kFloat, &pieces_largest_));
  return slices_.Create(SlicePipeline::ScratchBytes(shard_.slices(), shard_.replica, padded_hidden_), pieces);
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
  for (size_t i = 0; i < vocabulary_sums_.size(); ++i) {
    if (i == kWeighted && config_.class_weights == nullptr) continue;
    LOSSD_CUDA_PASS_ON(CreateZeros(kernels::kFixedSegments * GradientRowBytes(), &vocabulary_sums_[i]));
  }
  return {};
}

MemoryPlan CudaBackend::PlanMemory(const HeadConfig& config, const HeadShard& shard, Path path) {
  const int64_t padded = PaddedHidden(config.hidden_size);
  const int64_t stepped_rows = shard.stepped().count;
  const int64_t stepped = stepped_rows * padded * kFloat;
  const int64_t stepped_bias = config.bias ? stepped_rows * kFloat : 0;
  const int64_t elements = config.vocab_size * padded;
  const bool weighted = config.class_weights != nullptr;
  const int64_t vectors = (weighted ? 2 : 1) * padded * kFloat * kernels::kFixedSegments;
  const int64_t shared =
      (weighted ? static_cast<int64_t>(config.class_weights->size()) * kFloat : 0) + config.bias_bytes();
  MemoryPlan plan = {{"weights", elements * SizeOf(config.weight_type) + shared + vectors, kDevice}};
  if (config.master_weights) plan.push_back({"master_weights", stepped, kDevice});
  if (config.weight_gradients == WeightGradients::kAccumulated) {
    const int64_t gradient = CudaGradient::PlanBytes(config);
    plan.push_back({"gradient", config.double_buffer ? 2 * gradient : gradient, kDevice});
  }
  if (config.optimizer.moments() > 0) {
    plan.push_back({"optimizer", config.optimizer.moments() * (stepped + stepped_bias), kDevice});
  }
  if (shard.replicas > 1) {
    const bool frozen = config.weight_gradients == WeightGradients::kFrozen;
    const int64_t scratch = SlicePipeline::ScratchBytes(shard.slices(), shard.replica, padded);
    plan.push_back({"replica_sums", (frozen ? 0 : stepped + stepped_bias) + scratch, kDevice});
  }
  if (CanHold(config, shard, path)) plan.push_back({"held", config.held_bytes, kDevice});
  return plan;
}

MemoryPlan CudaBackend::MemoryReport() const {
  int64_t weights = weights_.bytes() + class_weights_.bytes() + bias_.bytes();
  for (const DeviceBuffer& sum : vocabulary_sums_) weights += sum.bytes();
  MemoryPlan plan = {{"weights", weights, kDevice}};
  if (config_.master_weights) plan.push_back({"master_weights", master_.bytes(), kDevice});
  if (!frozen()) plan.push_back({"gradient", own_.bytes(), kDevice});
  int64_t state = 0;
  for (size_t i = 0; i < moments_.size(); ++i) state += moments_[i].bytes() + bias_moments_[i].bytes();
  if (state > 0) plan.push_back({"optimizer", state, kDevice});
  if (over_replicas()) {
    plan.push_back({"replica_sums", sum_.bytes() + slices_.scratch().bytes(), kDevice});
  }
  if (hold_memory_.bytes() > 0) plan.push_back({"held", hold_memory_.bytes(), kDevice});
  return plan;
}

}  // namespace lossd::engine
