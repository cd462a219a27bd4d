// What a head on a CUDA device keeps between batches: weights, gradients and the optimizer's state, as rows
// that come and go.
#include <algorithm>
#include <vector>

#include "kernels/cuda/optimizer/optimizer.h"
#include "server/engine/device/cuda/cuda_backend.h"
#include "server/engine/device/cuda/cuda_status.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::SizeOf;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Result;

int64_t CudaBackend::WeightRowBytes() const { return padded_hidden_ * SizeOf(config_.weight_type); }
int64_t CudaBackend::GradientRowBytes() const { return padded_hidden_ * static_cast<int64_t>(sizeof(float)); }

absl::Status CudaBackend::PublishWeights(WeightBuffers staged) { return DeviceFailed(Publish(staged)); }

Result CudaBackend::Publish(const WeightBuffers& staged) {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  const DataType type = config_.master_type();
  const DeviceBuffer& to = config_.master_weights ? master_ : weights_;
  // After every batch that was given the old weights.
  LOSSD_CUDA_PASS_ON(WriteRows(to, padded_hidden_ * SizeOf(type), 0, config_.vocab_size,
                               config_.hidden_size * SizeOf(type), staged.weights.data()));
  if (config_.bias) LOSSD_CUDA_PASS_ON(WriteFloats(bias_, 0, config_.vocab_size, staged.bias.data()));
  LOSSD_CUDA_PASS_ON(DeriveFromWeights());
  LOSSD_CUDA_TRY(cudaStreamSynchronize(device_->pipeline.computing()));
  return {};
}

Result CudaBackend::DeriveFromWeights() {
  cudaStream_t stream = device_->pipeline.computing();
  const int64_t elements = config_.vocab_size * padded_hidden_;
  if (config_.master_weights) {
    LOSSD_CUDA_PASS_ON(
        kernels::cuda::NarrowMaster(Floats(master_), config_.weight_type, weights_.data(), elements, stream));
  }
  LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(config_.weight_type, weights_.data(), elements,
                                                     Floats(weight_largest_), stream));
  if (config_.bias) {
    LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(DataType::kFloat32, bias_.data(), config_.vocab_size,
                                                       Floats(bias_largest_), stream));
  }
  sums_of_.fill(std::nullopt);
  return {};
}

absl::Status CudaBackend::ReadWeightRows(int64_t first_row, int64_t rows, DataType type, void* out) {
  // In the type that batches work with it is what they work with, in others what is most exact.
  const bool from_master = config_.master_weights && type != config_.weight_type;
  const DeviceBuffer& from = from_master ? master_ : weights_;
  const DataType from_type = from_master ? DataType::kFloat32 : config_.weight_type;
  const int64_t row_bytes = config_.hidden_size * SizeOf(from_type);
  const int64_t stride_bytes = padded_hidden_ * SizeOf(from_type);
  if (type == from_type) {
    return DeviceFailed(ReadRows(from, stride_bytes, first_row, rows, row_bytes, out));
  }
  std::vector<char> as_it_is(static_cast<size_t>(rows * row_bytes));
  const Result result = ReadRows(from, stride_bytes, first_row, rows, row_bytes, as_it_is.data());
  if (!result.ok()) return DeviceFailed(result);
  kernels::Convert(from_type, as_it_is.data(), type, out, rows * config_.hidden_size);
  return absl::OkStatus();
}

absl::Status CudaBackend::ReadBias(int64_t first_row, int64_t rows, float* out) {
  return DeviceFailed(ReadFloats(bias_, first_row, rows, out));
}

absl::Status CudaBackend::ReadBiasGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) {
  const CudaGradient& gradient = of == nullptr ? own_ : *static_cast<const CudaGradient*>(of);
  if (gradient.empty) {
    std::fill_n(out, rows, 0.0f);
    return absl::OkStatus();
  }
  return DeviceFailed(ReadFloats(gradient.db, first_row, rows, out));
}

absl::Status CudaBackend::ReadGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) {
  const CudaGradient& gradient = of == nullptr ? own_ : *static_cast<const CudaGradient*>(of);
  if (gradient.empty) {
    std::fill_n(out, rows * config_.hidden_size, 0.0f);
    return absl::OkStatus();
  }
  const int64_t row_bytes = config_.hidden_size * static_cast<int64_t>(sizeof(float));
  Result result = ReadRows(gradient.dw, GradientRowBytes(), first_row, rows, row_bytes, out);
  if (result.ok()) result = SubtractSmoothing(gradient, first_row, rows, out);
  return DeviceFailed(result);
}

Result CudaBackend::SubtractSmoothing(const CudaGradient& gradient, int64_t first_row, int64_t rows,
                                      float* out) const {
  const int64_t hidden = config_.hidden_size;
  for (size_t i = 0; i < gradient.smoothings.size(); ++i) {
    if (gradient.smoothings[i].empty) continue;
    std::vector<float> t(static_cast<size_t>(hidden));
    const auto bytes = static_cast<int64_t>(t.size() * sizeof(float));
    LOSSD_CUDA_PASS_ON(ReadRows(gradient.smoothings[i].t, bytes, 0, 1, bytes, t.data()));
    for (int64_t row = 0; row < rows; ++row) {
      const auto entry = static_cast<size_t>(shard_.first_row() + first_row + row);
      const float weight = i == kWeighted ? (*config_.class_weights)[entry] : 1.0f;
      float* of_row = out + row * hidden;
      for (int64_t h = 0; h < hidden; ++h) of_row[h] -= weight * t[static_cast<size_t>(h)];
    }
  }
  return {};
}

void CudaBackend::Reset(Gradient* of) {
  CudaGradient& gradient = Find(of);
  gradient.empty = true;
  for (CudaGradient::Smoothing& smoothing : gradient.smoothings) smoothing.empty = true;
}

// Rows

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

Result CudaBackend::WriteFloats(const DeviceBuffer& buffer, int64_t first, int64_t count,
                                const void* in) const {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  LOSSD_CUDA_TRY(cudaMemcpyAsync(Floats(buffer) + first, in, static_cast<size_t>(count) * sizeof(float),
                                 cudaMemcpyHostToDevice, device_->pipeline.computing()));
  return {};
}

Result CudaBackend::WriteRows(const DeviceBuffer& buffer, int64_t stride_bytes, int64_t first_row,
                              int64_t rows, int64_t row_bytes, const void* in) const {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  char* to = static_cast<char*>(buffer.data()) + first_row * stride_bytes;
  LOSSD_CUDA_TRY(cudaMemcpy2DAsync(to, static_cast<size_t>(stride_bytes), in, static_cast<size_t>(row_bytes),
                                   static_cast<size_t>(row_bytes), static_cast<size_t>(rows),
                                   cudaMemcpyHostToDevice, device_->pipeline.computing()));
  return {};
}

// Checkpoints

const DeviceBuffer& CudaBackend::BufferOf(const StateEntry& entry) const {
  const bool of_bias = entry.of == StateOf::kBias;
  switch (entry.part) {
    case StatePart::kWeight:
      return of_bias ? bias_ : weights_;
    case StatePart::kMaster:
      return master_;
    case StatePart::kFirstMoment:
      return of_bias ? bias_moments_[0] : moments_[0];
    case StatePart::kSecondMoment:
      return of_bias ? bias_moments_[1] : moments_[1];
  }
  return weights_;
}

absl::Status CudaBackend::ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) {
  const absl::StatusOr<StateEntry> entry = FindState(config_, tensor);
  if (!entry.ok()) return entry.status();
  const DeviceBuffer& from = BufferOf(*entry);
  if (entry->of == StateOf::kBias) {
    return DeviceFailed(ReadFloats(from, first_row, rows, static_cast<float*>(out)));
  }
  const int64_t element = SizeOf(entry->tensor.type);
  return DeviceFailed(
      ReadRows(from, padded_hidden_ * element, first_row, rows, config_.hidden_size * element, out));
}

absl::Status CudaBackend::WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                                     const void* in) {
  const absl::StatusOr<StateEntry> entry = FindState(config_, tensor);
  if (!entry.ok()) return entry.status();
  const DeviceBuffer& to = BufferOf(*entry);
  const int64_t element = SizeOf(entry->tensor.type);
  const Result result = entry->of == StateOf::kBias ? WriteFloats(to, first_row, rows, in)
                                                    : WriteRows(to, padded_hidden_ * element, first_row, rows,
                                                                config_.hidden_size * element, in);
  return Finished(result);
}

absl::Status CudaBackend::RestoreState() {
  Result result(cudaSetDevice(device_->index), "cudaSetDevice");
  if (result.ok()) result = DeriveFromWeights();
  return Finished(result);
}

absl::Status CudaBackend::WriteGradient(Gradient* of, int64_t first_row, int64_t rows, const float* dw,
                                        const float* bias) {
  CudaGradient& gradient = Find(of);
  Result result = WriteGradientRows(gradient, first_row, rows, dw);
  if (result.ok() && bias != nullptr) result = WriteFloats(gradient.db, first_row, rows, bias);
  if (result.ok() && bias == nullptr && config_.bias) {
    result = {cudaMemsetAsync(Floats(gradient.db) + first_row, 0, static_cast<size_t>(rows) * sizeof(float),
                              device_->pipeline.computing()),
              "clearing a bias's gradient"};
  }
  // All of it is in dw.
  Reset(of);
  gradient.empty = false;
  return Finished(result);
}

Result CudaBackend::WriteGradientRows(const CudaGradient& gradient, int64_t first_row, int64_t rows,
                                      const float* dw) const {
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  const int64_t row_bytes = config_.hidden_size * kFloat;
  LOSSD_CUDA_PASS_ON(WriteRows(gradient.dw, GradientRowBytes(), first_row, rows, row_bytes, dw));
  const int64_t padding = padded_hidden_ - config_.hidden_size;
  if (padding == 0) return {};
  LOSSD_CUDA_TRY(cudaMemset2DAsync(Floats(gradient.dw) + first_row * padded_hidden_ + config_.hidden_size,
                                   static_cast<size_t>(GradientRowBytes()), 0,
                                   static_cast<size_t>(padding * kFloat), static_cast<size_t>(rows),
                                   device_->pipeline.computing()));
  return {};
}

absl::Status CudaBackend::Finished(Result result) const {
  // After an error too: copies that were enqueued before it are from and to memory of the caller's.
  const Result waited(cudaStreamSynchronize(device_->pipeline.computing()), "waiting for the device");
  if (result.ok()) result = waited;
  return DeviceFailed(result);
}

}  // namespace lossd::engine
