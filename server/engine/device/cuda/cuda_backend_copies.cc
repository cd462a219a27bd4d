// What a head on a CUDA device takes of another one.
#include "kernels/cuda/optimizer/blend.h"
#include "server/engine/device/cuda/cuda_backend.h"
#include "server/engine/device/cuda/cuda_status.h"

namespace lossd::engine {

using kernels::BlendFactors;
using kernels::DataType;
using kernels::RowSpan;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Result;

namespace {

// Both are of the same size, or empty.
Result Copy(const DeviceBuffer& from, const DeviceBuffer& to, cudaStream_t stream) {
  if (to.bytes() == 0) return {};
  LOSSD_CUDA_TRY(cudaMemcpyAsync(to.data(), from.data(), static_cast<size_t>(to.bytes()),
                                 cudaMemcpyDeviceToDevice, stream));
  return {};
}

}  // namespace

absl::Status CudaBackend::BlendWeights(const HeadBackend& other, double decay) {
  const auto& source = static_cast<const CudaBackend&>(other);  // of the same device
  Result result(cudaSetDevice(device_->index), "cudaSetDevice");
  if (result.ok()) result = AwaitCopies();
  // After every batch that was given the old weights, or the source's.
  if (result.ok()) result = decay == 0 ? CopyWeights(source) : Blend(source, decay);
  if (result.ok()) result = DeriveFromWeights();
  return Finished(result);
}

Result CudaBackend::CopyWeights(const CudaBackend& source) {
  cudaStream_t stream = device_->pipeline.computing();
  LOSSD_CUDA_PASS_ON(Copy(source.weights_, weights_, stream));
  LOSSD_CUDA_PASS_ON(Copy(source.bias_, bias_, stream));
  if (!config_.master_weights) return {};
  if (source.config_.master_weights) return Copy(source.master_, master_, stream);
  if (stepped_.count == 0) return {};
  return kernels::cuda::WidenWeights(config_.weight_type, source.WeightRow(stepped_.first),
                                     stepped_.count * padded_hidden_, Floats(master_), stream);
}

Result CudaBackend::Blend(const CudaBackend& source, double decay) {
  cudaStream_t stream = device_->pipeline.computing();
  const BlendFactors factors = kernels::BlendFactorsOf(decay);
  const bool from_master = source.config_.master_weights;
  const RowSpan rows = from_master || config_.master_weights ? stepped_ : RowSpan{0, config_.vocab_size};
  if (rows.count > 0) {
    LOSSD_CUDA_PASS_ON(
        kernels::cuda::Blend({.count = rows.count * padded_hidden_,
                              .weight_type = config_.weight_type,
                              .weight = WeightRow(rows.first),
                              .master = config_.master_weights ? Floats(master_) : nullptr},
                             {.type = from_master ? DataType::kFloat32 : config_.weight_type,
                              .values = from_master ? source.master_.data() : source.WeightRow(rows.first)},
                             factors, stream));
  }
  if (!config_.bias) return {};
  return kernels::cuda::Blend({.count = config_.vocab_size, .weight = bias_.data()},
                              {.values = source.bias_.data()}, factors, stream);
}

absl::Status CudaBackend::CopyOptimizer(const HeadBackend& other) {
  const auto& source = static_cast<const CudaBackend&>(other);
  cudaStream_t stream = device_->pipeline.computing();
  Result result(cudaSetDevice(device_->index), "cudaSetDevice");
  if (result.ok()) result = AwaitCopies();
  for (size_t i = 0; i < moments_.size(); ++i) {
    if (result.ok()) result = Copy(source.moments_[i], moments_[i], stream);
    if (result.ok()) result = Copy(source.bias_moments_[i], bias_moments_[i], stream);
  }
  return Finished(result);
}

}  // namespace lossd::engine
