// What the replicas of a head on CUDA devices do together when a window ends.
#include "kernels/collectives/slice_exchange.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "server/engine/device/cuda/cuda_backend.h"
#include "server/engine/device/cuda/cuda_status.h"
#include "server/engine/device/rank_status.h"
#include "server/engine/device/slice_checks.h"
#include "server/engine/device/slice_tallies.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::OptimizerCoefficients;
using kernels::RowSpan;
using kernels::SizeOf;
using kernels::SliceLayout;
using kernels::collectives::SliceExchange;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::GradientRows;
using kernels::cuda::Result;

absl::Status CudaBackend::CheckSummed() const {
  // Who steps nothing is not given anything either.
  return sum_.empty && stepped_.count() > 0 ? NotSummed() : absl::OkStatus();
}

// The sum

absl::Status CudaBackend::SumSlices(Gradient* of, const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  CudaGradient& gradient = Find(of);
  if (const Result settled = Settle(gradient); !settled.ok()) return DeviceFailed(settled);
  sum_.empty = true;  // until all of it is there: nothing is to be stepped by parts of two windows
  const SliceLayout layout = shard_.slices();
  cudaStream_t stream = device_->pipeline.computing();
  absl::Status summed = slices_.Sum(layout, padded_hidden_, replicas.device, Floats(gradient.dw),
                                    SumsIn(sum_.dw, padded_hidden_), stream);
  if (summed.ok() && config_.bias) {
    summed = slices_.Sum(layout, 1, replicas.device, Floats(gradient.db), SumsIn(sum_.db, 1), stream);
  }
  if (summed.ok()) summed = ToStatus(replicas.device->Wait(stream));
  sum_.empty = !summed.ok();
  return summed;
}

SlicePipeline::Sums CudaBackend::SumsIn(const DeviceBuffer& buffer, int64_t columns) const {
  return {.own = Floats(buffer), .mirrored = Floats(buffer) + stepped_.own().count * columns};
}

// What it says stays the same: an empty gradient is still overwritten by what comes next.
Result CudaBackend::Settle(CudaGradient& gradient) const {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  cudaStream_t stream = device_->pipeline.computing();
  if (gradient.empty) {
    const DeviceBuffer& dw = gradient.dw;
    const DeviceBuffer& db = gradient.db;
    LOSSD_CUDA_TRY(cudaMemsetAsync(dw.data(), 0, static_cast<size_t>(dw.bytes()), stream));
    if (config_.bias) LOSSD_CUDA_TRY(cudaMemsetAsync(db.data(), 0, static_cast<size_t>(db.bytes()), stream));
    return {};
  }
  const GradientRows dw = PartsOf(gradient).dw;
  if (dw.uniform_smoothing == nullptr && dw.weighted_smoothing == nullptr) return {};
  LOSSD_CUDA_PASS_ON(
      kernels::cuda::GatherGradient(MatrixShape(config_.vocab_size), dw, Floats(gradient.dw), stream));
  for (CudaGradient::Smoothing& smoothing : gradient.smoothings) smoothing.empty = true;
  return {};
}

CudaBackend::GradientParts CudaBackend::SumOf(const RowSpan& slice) const {
  const int64_t place = stepped_.PlaceOf(slice.first);
  GradientParts parts{.rows = slice};
  parts.dw.values = Floats(sum_.dw) + place * padded_hidden_;
  if (config_.bias) parts.db.values = Floats(sum_.db) + place;
  return parts;
}

absl::StatusOr<GradientTallies> CudaBackend::TallySum(double scale, const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  const auto factor = static_cast<float>(scale);
  const absl::StatusOr<GradientTallies> own = TallySlice(stepped_.own(), factor);
  if (!own.ok()) return own.status();
  const absl::StatusOr<GradientTallies> mirrored = TallySlice(stepped_.mirrored(), factor);
  if (!mirrored.ok()) return mirrored.status();
  return MergeSlices({*own, *mirrored}, replicas.host);
}

// In an order that follows from the slice's size alone: its owner and its mirror have the same bits.
absl::StatusOr<GradientTallies> CudaBackend::TallySlice(const RowSpan& slice, float scale) const {
  if (slice.count == 0) return GradientTallies{};
  CudaTallies tallies;
  Result result = Tally(SumOf(slice), scale);
  if (result.ok()) result = ReadTallies(&tallies);
  if (!result.ok()) return DeviceFailed(result);
  return WholeOf(tallies);
}

// The step

absl::Status CudaBackend::StepSlices(const StepArguments& arguments) {
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  const absl::StatusOr<OptimizerCoefficients> coefficients = CoefficientsFor(config_, arguments);
  if (!coefficients.ok()) return coefficients.status();
  return Finished(StepBothSlices(*coefficients));
}

Result CudaBackend::StepBothSlices(const OptimizerCoefficients& coefficients) {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  const DeviceBuffer& largest = slices_largest_;
  LOSSD_CUDA_TRY(cudaMemsetAsync(largest.data(), 0, static_cast<size_t>(largest.bytes()),
                                 device_->pipeline.computing()));
  float* of_slice = Floats(largest);
  for (const RowSpan& slice : {stepped_.own(), stepped_.mirrored()}) {
    if (slice.count > 0) LOSSD_CUDA_PASS_ON(Step(SumOf(slice), coefficients, of_slice));
    ++of_slice;
  }
  knows_slices_largest_ = true;
  return {};
}

// Only what others have stepped has to be looked at.
Result CudaBackend::DeriveFromSlices() {
  cudaStream_t stream = device_->pipeline.computing();
  float* const largest = Floats(weight_largest_);
  LOSSD_CUDA_PASS_ON(
      kernels::cuda::LargestMagnitude(DataType::kFloat32, slices_largest_.data(), 2, largest, stream));
  const SliceLayout layout = shard_.slices();
  for (int32_t slice = 0; slice < layout.replicas(); ++slice) {
    if (layout.Steps(shard_.replica, slice)) continue;
    const RowSpan rows = layout.Slice(slice);
    LOSSD_CUDA_PASS_ON(kernels::cuda::RaiseLargest(config_.weight_type, WeightRow(rows.first),
                                                   rows.count * padded_hidden_, largest, stream));
  }
  return DeriveFromBias();
}

// In one piece: nothing is added up on the way, so rows go from place to place.
absl::Status CudaBackend::GatherSlices(const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  Result result(cudaSetDevice(device_->index), "cudaSetDevice");
  if (!result.ok()) return DeviceFailed(result);
  cudaStream_t stream = device_->pipeline.computing();
  const auto gather = [&](const DeviceBuffer& values, int64_t columns, int64_t entry_bytes) {
    SliceExchange exchange(shard_.slices(), columns, replicas.device);
    return ToStatus(exchange.Gather(values.data(), entry_bytes, 0, 1, stream));
  };
  absl::Status gathered = gather(weights_, padded_hidden_, SizeOf(config_.weight_type));
  if (gathered.ok() && config_.bias) gathered = gather(bias_, 1, SizeOf(DataType::kFloat32));
  if (!gathered.ok()) return gathered;
  result = knows_slices_largest_ ? DeriveFromSlices() : DeriveFromWeights();
  return result.ok() ? ToStatus(replicas.device->Wait(stream)) : DeviceFailed(result);
}

// Rows of the sum

absl::Status CudaBackend::ReadSum(int64_t first_row, int64_t rows, float* out) {
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  return ReadStepped(sum_.dw, MatrixBytes(DataType::kFloat32), {first_row, rows}, out);
}

absl::Status CudaBackend::ReadBiasSum(int64_t first_row, int64_t rows, float* out) {
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  return ReadStepped(sum_.db, kBiasBytes, {first_row, rows}, out);
}

absl::Status CudaBackend::WriteSum(int64_t first_row, int64_t rows, const float* dw, const float* bias) {
  const RowSpan span{first_row, rows};
  absl::Status written = WriteStepped(sum_.dw, MatrixBytes(DataType::kFloat32), span, dw);
  if (written.ok() && bias != nullptr) written = WriteStepped(sum_.db, kBiasBytes, span, bias);
  sum_.empty = !written.ok();
  return written;
}

}  // namespace lossd::engine
