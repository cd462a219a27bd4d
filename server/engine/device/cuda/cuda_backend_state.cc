// What a head on a CUDA device keeps between batches: weights, gradients and the optimizer's state, as rows
// that come and go.
#include <algorithm>
#include <vector>

#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/cuda/rows/bias.h"
#include "server/engine/device/cuda/cuda_backend.h"
#include "server/engine/device/cuda/cuda_status.h"
#include "server/engine/device/cuda/stream_order.h"
#include "server/engine/device/slice_checks.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::RowSpan;
using kernels::SizeOf;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Result;

int64_t CudaBackend::WeightRowBytes() const { return padded_hidden_ * SizeOf(config_.weight_type); }
int64_t CudaBackend::GradientRowBytes() const { return padded_hidden_ * static_cast<int64_t>(sizeof(float)); }
CudaBackend::RowBytes CudaBackend::MatrixBytes(DataType type) const {
  return {padded_hidden_ * SizeOf(type), config_.hidden_size * SizeOf(type)};
}

absl::Status CudaBackend::PublishWeights(WeightBuffers staged) { return DeviceFailed(Publish(staged)); }

Result CudaBackend::Publish(const WeightBuffers& staged) {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  const DataType type = config_.master_type();
  const DeviceBuffer& to = config_.master_weights ? master_ : weights_;
  LOSSD_CUDA_PASS_ON(AwaitCopies());
  // After every batch that was given the old weights.
  if (config_.master_weights && over_replicas()) {
    LOSSD_CUDA_PASS_ON(WriteMaster(AllRows(), staged.weights.data()));
  } else {
    LOSSD_CUDA_PASS_ON(WriteRows(to, MatrixBytes(type), AllRows(), staged.weights.data()));
    if (config_.master_weights) LOSSD_CUDA_PASS_ON(NarrowMaster());
  }
  if (config_.bias) LOSSD_CUDA_PASS_ON(WriteRows(bias_, kBiasBytes, AllRows(), staged.bias.data()));
  LOSSD_CUDA_PASS_ON(DeriveFromWeights());
  LOSSD_CUDA_TRY(cudaStreamSynchronize(device_->pipeline.computing()));
  return {};
}

// All of these rows become weights; of the master there are only those that are stepped here. As many at a
// time as the memory takes that is there for rows on their way.
Result CudaBackend::WriteMaster(const RowSpan& all, const void* master) {
  cudaStream_t stream = device_->pipeline.computing();
  const DeviceBuffer& passing = slices_.scratch();
  const RowBytes bytes = MatrixBytes(DataType::kFloat32);
  const int64_t most = std::min(all.count, passing.bytes() / bytes.stride);
  // Padding becomes padding.
  LOSSD_CUDA_TRY(cudaMemsetAsync(passing.data(), 0, static_cast<size_t>(most * bytes.stride), stream));
  for (RowSpan rows{all.first, most}; rows.count > 0;) {
    LOSSD_CUDA_PASS_ON(
        WriteRows(passing, bytes, {0, rows.count},
                  static_cast<const std::byte*>(master) + (rows.first - all.first) * bytes.row));
    LOSSD_CUDA_PASS_ON(kernels::cuda::NarrowMaster(
        Floats(passing), config_.weight_type, WeightRow(rows.first), rows.count * padded_hidden_, stream));
    if (const RowSpan here = rows.Common(stepped_); here.count > 0) {
      LOSSD_CUDA_TRY(cudaMemcpyAsync(Floats(master_) + (here.first - stepped_.first) * padded_hidden_,
                                     Floats(passing) + (here.first - rows.first) * padded_hidden_,
                                     static_cast<size_t>(here.count * bytes.stride), cudaMemcpyDeviceToDevice,
                                     stream));
    }
    rows = {rows.end(), std::min(most, all.end() - rows.end())};
  }
  return {};
}

Result CudaBackend::NarrowMaster() {
  if (stepped_.count == 0) return {};
  return kernels::cuda::NarrowMaster(Floats(master_), config_.weight_type, WeightRow(stepped_.first),
                                     stepped_.count * padded_hidden_, device_->pipeline.computing());
}

Result CudaBackend::DeriveFromWeights() {
  knows_pieces_largest_ = false;
  LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(config_.weight_type, weights_.data(),
                                                     config_.vocab_size * padded_hidden_,
                                                     Floats(weight_largest_), device_->pipeline.computing()));
  return DeriveFromBias();
}

void CudaBackend::ForgetWeights() {
  sums_of_.fill(std::nullopt);
  if (holds_.has_value()) holds_->Clear();
}

Result CudaBackend::DeriveFromBias() {
  ForgetWeights();
  if (!config_.bias) return {};
  return kernels::cuda::LargestShift(Floats(bias_), config_.vocab_size, Floats(bias_largest_),
                                     device_->pipeline.computing());
}

absl::Status CudaBackend::ReadWeightRows(int64_t first_row, int64_t rows, DataType type, void* out) {
  // In the type that batches work with it is what they work with, in others what is most exact.
  const bool from_master = config_.master_weights && type != config_.weight_type;
  const DataType from_type = from_master ? DataType::kFloat32 : config_.weight_type;
  const RowBytes bytes = MatrixBytes(from_type);
  const RowSpan span{first_row, rows};
  const auto read = [&](void* to) {
    return from_master ? ReadStepped(master_, bytes, span, to)
                       : DeviceFailed(ReadRows(weights_, bytes, span, to));
  };
  if (type == from_type) return read(out);
  std::vector<char> as_it_is(static_cast<size_t>(rows * bytes.row));
  if (absl::Status status = read(as_it_is.data()); !status.ok()) return status;
  kernels::Convert(from_type, as_it_is.data(), type, out, rows * config_.hidden_size);
  return absl::OkStatus();
}

absl::Status CudaBackend::ReadBias(int64_t first_row, int64_t rows, float* out) {
  return DeviceFailed(ReadRows(bias_, kBiasBytes, {first_row, rows}, out));
}

absl::Status CudaBackend::ReadBiasGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) {
  const CudaGradient& gradient = of == nullptr ? own_ : *static_cast<const CudaGradient*>(of);
  if (gradient.empty) {
    std::fill_n(out, rows, 0.0f);
    return absl::OkStatus();
  }
  return DeviceFailed(ReadRows(gradient.db, kBiasBytes, {first_row, rows}, out));
}

absl::Status CudaBackend::ReadGradient(const Gradient* of, int64_t first_row, int64_t rows, float* out) {
  const CudaGradient& gradient = of == nullptr ? own_ : *static_cast<const CudaGradient*>(of);
  if (gradient.empty) {
    std::fill_n(out, rows * config_.hidden_size, 0.0f);
    return absl::OkStatus();
  }
  Result result = ReadRows(gradient.dw, MatrixBytes(DataType::kFloat32), {first_row, rows}, out);
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
    LOSSD_CUDA_PASS_ON(ReadRows(gradient.smoothings[i].t, {bytes, bytes}, {0, 1}, t.data()));
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

Result CudaBackend::ReadRows(const DeviceBuffer& buffer, const RowBytes& bytes, const RowSpan& rows,
                             void* out) const {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  cudaStream_t stream = device_->pipeline.computing();
  LOSSD_CUDA_PASS_ON(EnqueueRead(buffer, bytes, rows, out, stream));
  LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
  return {};
}

Result CudaBackend::EnqueueRead(const DeviceBuffer& buffer, const RowBytes& bytes, const RowSpan& rows,
                                void* out, cudaStream_t stream) {
  const char* from = static_cast<const char*>(buffer.data()) + rows.first * bytes.stride;
  if (bytes.stride == bytes.row) {
    LOSSD_CUDA_TRY(cudaMemcpyAsync(out, from, static_cast<size_t>(rows.count * bytes.row),
                                   cudaMemcpyDeviceToHost, stream));
  } else {
    LOSSD_CUDA_TRY(cudaMemcpy2DAsync(out, static_cast<size_t>(bytes.row), from,
                                     static_cast<size_t>(bytes.stride), static_cast<size_t>(bytes.row),
                                     static_cast<size_t>(rows.count), cudaMemcpyDeviceToHost, stream));
  }
  return {};
}

Result CudaBackend::WriteRows(const DeviceBuffer& buffer, const RowBytes& bytes, const RowSpan& rows,
                              const void* in) const {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  char* to = static_cast<char*>(buffer.data()) + rows.first * bytes.stride;
  cudaStream_t stream = device_->pipeline.computing();
  if (bytes.stride == bytes.row) {
    LOSSD_CUDA_TRY(
        cudaMemcpyAsync(to, in, static_cast<size_t>(rows.count * bytes.row), cudaMemcpyHostToDevice, stream));
  } else {
    LOSSD_CUDA_TRY(cudaMemcpy2DAsync(to, static_cast<size_t>(bytes.stride), in,
                                     static_cast<size_t>(bytes.row), static_cast<size_t>(bytes.row),
                                     static_cast<size_t>(rows.count), cudaMemcpyHostToDevice, stream));
  }
  return {};
}

absl::Status CudaBackend::ReadStepped(const DeviceBuffer& buffer, const RowBytes& bytes, const RowSpan& rows,
                                      void* out) const {
  if (absl::Status checked = CheckStepped(rows, stepped_); !checked.ok()) return checked;
  return DeviceFailed(ReadRows(buffer, bytes, {rows.first - stepped_.first, rows.count}, out));
}

absl::Status CudaBackend::WriteStepped(const DeviceBuffer& buffer, const RowBytes& bytes, const RowSpan& rows,
                                       const void* in) const {
  if (absl::Status checked = CheckStepped(rows, stepped_); !checked.ok()) return checked;
  return Finished(WriteRows(buffer, bytes, {rows.first - stepped_.first, rows.count}, in));
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

CudaBackend::RowBytes CudaBackend::BytesOf(const StateEntry& entry) const {
  return entry.of == StateOf::kBias ? kBiasBytes : MatrixBytes(entry.tensor.type);
}

absl::Status CudaBackend::ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) {
  const absl::StatusOr<StateEntry> entry = FindState(config_, tensor);
  if (!entry.ok()) return entry.status();
  const RowSpan span{first_row, rows};
  if (entry->part != StatePart::kWeight) return ReadStepped(BufferOf(*entry), BytesOf(*entry), span, out);
  return DeviceFailed(ReadRows(BufferOf(*entry), BytesOf(*entry), span, out));
}

absl::Status CudaBackend::WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                                     const void* in) {
  const absl::StatusOr<StateEntry> entry = FindState(config_, tensor);
  if (!entry.ok()) return entry.status();
  if (const Result behind = AwaitCopies(); !behind.ok()) return DeviceFailed(behind);
  const RowSpan span{first_row, rows};
  if (entry->part == StatePart::kMaster && over_replicas()) {
    Result result(cudaSetDevice(device_->index), "cudaSetDevice");
    if (result.ok()) result = WriteMaster(span, in);
    return Finished(result);
  }
  if (entry->part != StatePart::kWeight) return WriteStepped(BufferOf(*entry), BytesOf(*entry), span, in);
  return Finished(WriteRows(BufferOf(*entry), BytesOf(*entry), span, in));
}

absl::Status CudaBackend::RestoreState() {
  Result result(cudaSetDevice(device_->index), "cudaSetDevice");
  if (result.ok() && config_.master_weights) result = NarrowMaster();
  if (result.ok()) result = DeriveFromWeights();
  return Finished(result);
}

absl::StatusOr<HeadBackend::CopyDone> CudaBackend::CopyState(std::span<const StateCopy> copies) {
  if (copies_ == nullptr || over_replicas()) return HeadBackend::CopyState(copies);
  if (const Result enqueued = EnqueueCopies(copies); !enqueued.ok()) return DeviceFailed(enqueued);
  return CopyDone([under_way = copies_] {
    Result result(cudaSetDevice(under_way->device), "cudaSetDevice");
    if (result.ok()) result = {cudaEventSynchronize(under_way->done.get()), "copying a head's state"};
    return DeviceFailed(result);
  });
}

Result CudaBackend::EnqueueCopies(std::span<const StateCopy> copies) const {
  // Results of batches leave by the same way, and get a turn between two pieces; of which there are not so
  // many that the stream would keep this thread waiting.
  constexpr int64_t kPieceBytes = int64_t{8} << 20;
  constexpr int64_t kMostPieces = 512;
  int64_t bytes_of_all = 0;
  for (const auto& [tensor, out] : copies) {
    bytes_of_all += tensor.rows * tensor.columns * SizeOf(tensor.type);
  }
  const int64_t piece_bytes = std::max(kPieceBytes, bytes_of_all / kMostPieces);
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  cudaStream_t stream = copies_->stream.get();
  LOSSD_CUDA_PASS_ON(Order(device_->pipeline.computing(), copies_->done, stream));
  for (const auto& [tensor, out] : copies) {
    const absl::StatusOr<StateEntry> entry = FindState(config_, tensor.name);
    if (!entry.ok()) return {cudaErrorInvalidValue, "a tensor that the head has not"};
    const RowBytes bytes = BytesOf(*entry);
    const int64_t most = std::max<int64_t>(1, piece_bytes / bytes.row);
    for (RowSpan rows{0, std::min(most, tensor.rows)}; rows.count > 0;
         rows = {rows.end(), std::min(most, tensor.rows - rows.end())}) {
      LOSSD_CUDA_PASS_ON(EnqueueRead(BufferOf(*entry), bytes, rows,
                                     static_cast<char*>(out) + rows.first * bytes.row, stream));
    }
  }
  LOSSD_CUDA_TRY(cudaEventRecord(copies_->done.get(), stream));
  return {};
}

Result CudaBackend::AwaitCopies() const {
  if (copies_ == nullptr) return {};
  LOSSD_CUDA_TRY(cudaStreamWaitEvent(device_->pipeline.computing(), copies_->done.get(), 0));
  return {};
}

absl::Status CudaBackend::WriteGradient(Gradient* of, int64_t first_row, int64_t rows, const float* dw,
                                        const float* bias) {
  CudaGradient& gradient = Find(of);
  Result result = WriteGradientRows(gradient, first_row, rows, dw);
  if (result.ok() && bias != nullptr) result = WriteRows(gradient.db, kBiasBytes, {first_row, rows}, bias);
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
  LOSSD_CUDA_PASS_ON(WriteRows(gradient.dw, MatrixBytes(DataType::kFloat32), {first_row, rows}, dw));
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
