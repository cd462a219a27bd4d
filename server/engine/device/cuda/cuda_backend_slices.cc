// What the replicas of a head on CUDA devices do together when a window ends.
#include <algorithm>
#include <vector>

#include "kernels/collectives/slice_exchange.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/rounding.h"
#include "server/engine/device/cuda/cuda_backend.h"
#include "server/engine/device/cuda/cuda_status.h"
#include "server/engine/device/rank_status.h"
#include "server/engine/device/slice_checks.h"
#include "server/engine/device/slice_tallies.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::GradientTally;
using kernels::OptimizerCoefficients;
using kernels::RowSpan;
using kernels::SizeOf;
using kernels::SliceLayout;
using kernels::collectives::Communicator;
using kernels::collectives::SliceExchange;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::ElementSpan;
using kernels::cuda::GradientRows;
using kernels::cuda::PaddedRows;
using kernels::cuda::Parts;
using kernels::cuda::Result;

namespace {

// What is pulled from the other of two replicas at once is half of all that is left, and no less than this:
// starting a copy costs 14 us, and what comes last is added up beside nothing.
constexpr int64_t kLeastPulled = int64_t{32} << 20;

// How a slice of so many bytes is pulled, where so many are left with it.
std::vector<Parts> PulledParts(int64_t bytes, int64_t left) {
  const auto all = static_cast<int32_t>(kernels::CeilDivide(bytes, kLeastPulled));
  std::vector<Parts> pulled;
  for (int32_t at = 0; at < all;) {
    const int64_t half = (left - at * kLeastPulled) / (2 * kLeastPulled);
    const auto count = static_cast<int32_t>(std::clamp<int64_t>(half, 1, all - at));
    pulled.push_back({.first = at, .end = at + count, .of = all});
    at += count;
  }
  return pulled;
}

}  // namespace

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
  summed_.reset();
  cudaStream_t stream = device_->pipeline.computing();
  absl::Status summed = SumMatrices(gradient, replicas.device);
  if (summed.ok() && config_.bias) {
    summed =
        slices_.Sum(shard_.slices(), 1, replicas.device, Floats(gradient.db), SumsIn(sum_.db, 1), stream);
  }
  if (summed.ok()) summed = ToStatus(replicas.device->Wait(stream));
  sum_.empty = !summed.ok();
  return summed;
}

absl::Status CudaBackend::SumMatrices(const CudaGradient& gradient, Communicator* replicas) {
  const absl::StatusOr<const float*> other = FindOther(gradient, replicas);
  if (!other.ok()) return other.status();
  cudaStream_t stream = device_->pipeline.computing();
  if (*other == nullptr) {
    return slices_.Sum(shard_.slices(), padded_hidden_, replicas, Floats(gradient.dw),
                       SumsIn(sum_.dw, padded_hidden_), stream);
  }
  Result added = AddOther(gradient, *other);
  if (added.ok()) added = KeepTallies();
  if (!added.ok()) return DeviceFailed(added);
  // Before this one's gradient may change, the other has read it.
  return ToStatus(replicas->Barrier(stream));
}

// Where there are two replicas each steps both slices. With more, reading every slice at two of them would
// take nearly twice of what sending sums on takes.
absl::StatusOr<const float*> CudaBackend::FindOther(const CudaGradient& gradient, Communicator* replicas) {
  if (shard_.replicas != 2) return nullptr;
  std::shared_ptr<PeerGradients> peers = peers_.lock();
  if (peers == nullptr || !peers->Are(replicas)) {
    if (const Result made = PeerGradients::Create(replicas, &peers); !made.ok()) return DeviceFailed(made);
    replicas->Keep(peers);
    peers_ = peers;
  }
  const DeviceBuffer& dw = gradient.dw;
  const kernels::cuda::PeerMemory* reached = nullptr;
  const absl::Status met =
      peers->Meet({dw.data(), dw.bytes(), gradient.number}, device_->pipeline.computing(), &reached);
  if (!met.ok()) return met;
  if (reached == nullptr) return nullptr;
  return static_cast<const float*>(reached->At(1 - shard_.replica, dw.data()));
}

// The sum of two has the same bits in either order. While some of it is added up the rest comes.
Result CudaBackend::AddOther(const CudaGradient& gradient, const float* other) {
  const std::shared_ptr<PeerGradients> peers = peers_.lock();
  LOSSD_CUDA_PASS_ON(peers->BeginPulling(device_->pipeline.computing()));
  const auto bytes = [this](int64_t rows) { return rows * padded_hidden_ * SizeOf(DataType::kFloat32); };
  int64_t left = bytes(stepped_.count());
  GradientTally* tally = TalliesIn(device_->tallies);
  for (const RowSpan& slice : {stepped_.own(), stepped_.mirrored()}) {
    for (const Parts& parts : PulledParts(bytes(slice.count), left)) {
      LOSSD_CUDA_PASS_ON(AddParts(slice, parts, gradient, other, *peers, tally));
    }
    left -= bytes(slice.count);
    ++tally;
  }
  return {};
}

Result CudaBackend::AddParts(const RowSpan& slice, const Parts& parts, const CudaGradient& gradient,
                             const float* other, PeerGradients& peers, GradientTally* tally) {
  cudaStream_t stream = device_->pipeline.computing();
  const PaddedRows shape = MatrixShape(slice.count);
  const ElementSpan pulled = kernels::cuda::ElementsOf(shape, parts);
  const int64_t first = slice.first * padded_hidden_;
  float* const sum = Floats(sum_.dw) + stepped_.PlaceOf(slice.first) * padded_hidden_;
  LOSSD_CUDA_PASS_ON(peers.Pull(other + first + pulled.first, sum + pulled.first,
                                pulled.count * SizeOf(DataType::kFloat32), stream));
  return kernels::cuda::AddAndTally(shape, parts, Floats(gradient.dw) + first, expected_scale_, sum,
                                    device_->tallies.data(), tally, stream);
}

Result CudaBackend::KeepTallies() {
  SummedTallies tallies{.scale = expected_scale_};
  cudaStream_t stream = device_->pipeline.computing();
  LOSSD_CUDA_TRY(cudaMemcpyAsync(tallies.dw.data(), TalliesIn(device_->tallies), sizeof(tallies.dw),
                                 cudaMemcpyDeviceToHost, stream));
  LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
  summed_ = tallies;
  return {};
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
  expected_scale_ = factor;
  const SummedTallies* const known = summed_.has_value() && summed_->scale == factor ? &*summed_ : nullptr;
  const absl::StatusOr<GradientTallies> own =
      TallySlice(stepped_.own(), factor, known == nullptr ? nullptr : &known->dw[0]);
  if (!own.ok()) return own.status();
  const absl::StatusOr<GradientTallies> mirrored =
      TallySlice(stepped_.mirrored(), factor, known == nullptr ? nullptr : &known->dw[1]);
  if (!mirrored.ok()) return mirrored.status();
  return MergeSlices({*own, *mirrored}, replicas.host);
}

// In an order that follows from the slice's size alone: its owner and its mirror have the same bits.
absl::StatusOr<GradientTallies> CudaBackend::TallySlice(const RowSpan& slice, float scale,
                                                        const GradientTally* dw) const {
  if (slice.count == 0) return GradientTallies{};
  CudaTallies tallies;
  Result result = dw == nullptr ? Tally(SumOf(slice), scale) : TallyBias(SumOf(slice), scale);
  if (result.ok() && (dw == nullptr || config_.bias)) result = ReadTallies(&tallies);
  if (!result.ok()) return DeviceFailed(result);
  if (dw != nullptr) tallies[0] = *dw;
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
  summed_.reset();
  const RowSpan span{first_row, rows};
  absl::Status written = WriteStepped(sum_.dw, MatrixBytes(DataType::kFloat32), span, dw);
  if (written.ok() && bias != nullptr) written = WriteStepped(sum_.db, kBiasBytes, span, bias);
  sum_.empty = !written.ok();
  return written;
}

}  // namespace lossd::engine
