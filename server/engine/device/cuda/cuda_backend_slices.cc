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

// How a slice of so many bytes is pulled.
std::vector<Parts> PulledParts(int64_t bytes) {
  const auto all = static_cast<int32_t>(kernels::CeilDivide(bytes, kLeastPulled));
  std::vector<Parts> pulled;
  for (int32_t at = 0; at < all;) {
    const int32_t count = std::max(1, (all - at) / 2);
    pulled.push_back({.first = at, .end = at + count, .of = all});
    at += count;
  }
  return pulled;
}

}  // namespace

absl::Status CudaBackend::CheckSummed() const {
  // Who steps nothing is not given anything either.
  return sum_.empty && stepped_.count > 0 ? NotSummed() : absl::OkStatus();
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
    summed = slices_.Sum(shard_.slices(), 1, replicas.device, Floats(gradient.db), Floats(sum_.db), stream);
  }
  if (summed.ok()) summed = ToStatus(replicas.device->Wait(stream));
  sum_.empty = !summed.ok();
  return summed;
}

absl::Status CudaBackend::AddToSum(Gradient* of, int32_t replica, const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  CudaGradient* const own = replica == shard_.replica ? &Find(of) : nullptr;
  if (own != nullptr) {
    if (const Result settled = Settle(*own); !settled.ok()) return DeviceFailed(settled);
  }
  sum_.empty = true;
  summed_.reset();
  cudaStream_t stream = device_->pipeline.computing();
  const auto add = [&](int64_t columns, const float* values, const DeviceBuffer& sums) {
    return slices_.AddOne(shard_.slices(), columns, replicas.device, replica, values, Floats(sums), stream);
  };
  absl::Status added = add(padded_hidden_, own == nullptr ? nullptr : Floats(own->dw), sum_.dw);
  if (added.ok() && config_.bias) added = add(1, own == nullptr ? nullptr : Floats(own->db), sum_.db);
  if (added.ok()) added = ToStatus(replicas.device->Wait(stream));
  sum_.empty = !added.ok();
  return added;
}

absl::Status CudaBackend::SumMatrices(const CudaGradient& gradient, Communicator* replicas) {
  const absl::StatusOr<const float*> other = FindOther(gradient, replicas);
  if (!other.ok()) return other.status();
  cudaStream_t stream = device_->pipeline.computing();
  if (*other == nullptr) {
    return slices_.Sum(shard_.slices(), padded_hidden_, replicas, Floats(gradient.dw), Floats(sum_.dw),
                       stream);
  }
  Result added = AddOther(gradient, *other);
  if (added.ok()) added = KeepTally();
  if (!added.ok()) return DeviceFailed(added);
  // Before this one's gradient may change, the other has read it.
  return ToStatus(replicas->Barrier(stream));
}

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
  cudaStream_t stream = device_->pipeline.computing();
  LOSSD_CUDA_PASS_ON(peers->BeginPulling(stream));
  const PaddedRows shape = MatrixShape(stepped_.count);
  const int64_t first = stepped_.first * padded_hidden_;
  float* const sum = Floats(sum_.dw);
  for (const Parts& parts : PulledParts(stepped_.count * GradientRowBytes())) {
    const ElementSpan pulled = kernels::cuda::ElementsOf(shape, parts);
    LOSSD_CUDA_PASS_ON(peers->Pull(other + first + pulled.first, sum + pulled.first,
                                   pulled.count * SizeOf(DataType::kFloat32), stream));
    LOSSD_CUDA_PASS_ON(kernels::cuda::AddAndTally(shape, parts, Floats(gradient.dw) + first, expected_scale_,
                                                  sum, device_->tallies.data(), TalliesIn(device_->tallies),
                                                  stream));
  }
  return {};
}

Result CudaBackend::KeepTally() {
  SummedTally tally{.scale = expected_scale_};
  cudaStream_t stream = device_->pipeline.computing();
  if (stepped_.count > 0) {
    LOSSD_CUDA_TRY(cudaMemcpyAsync(&tally.dw, TalliesIn(device_->tallies), sizeof(tally.dw),
                                   cudaMemcpyDeviceToHost, stream));
  }
  LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
  summed_ = tally;
  return {};
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

CudaBackend::GradientParts CudaBackend::SumOf(const RowSpan& rows) const {
  const int64_t place = rows.first - stepped_.first;
  GradientParts parts{.rows = rows};
  parts.dw.values = Floats(sum_.dw) + place * padded_hidden_;
  if (config_.bias) parts.db.values = Floats(sum_.db) + place;
  return parts;
}

absl::StatusOr<GradientTallies> CudaBackend::TallySum(double scale, const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  expected_scale_ = static_cast<float>(scale);
  const absl::StatusOr<GradientTallies> own = TallySlice(expected_scale_);
  return own.ok() ? MergeTallies(*own, replicas.host) : own.status();
}

absl::StatusOr<GradientTallies> CudaBackend::TallySlice(float scale) const {
  if (stepped_.count == 0) return GradientTallies{};
  const bool knows = summed_.has_value() && summed_->scale == scale;
  CudaTallies tallies;
  Result result = knows ? TallyBias(SumOf(stepped_), scale) : Tally(SumOf(stepped_), scale);
  if (result.ok() && (!knows || config_.bias)) result = ReadTallies(&tallies);
  if (!result.ok()) return DeviceFailed(result);
  if (knows) tallies[0] = summed_->dw;
  return WholeOf(tallies);
}

// The step

absl::Status CudaBackend::StepSlices(const StepArguments& arguments) {
  if (absl::Status summed = CheckSummed(); !summed.ok()) return summed;
  const absl::StatusOr<OptimizerCoefficients> coefficients = CoefficientsFor(config_, arguments);
  if (!coefficients.ok()) return coefficients.status();
  return DeviceFailed(StepPieces(*coefficients));
}

// GatherSlices waits for it.
Result CudaBackend::StepPieces(const OptimizerCoefficients& coefficients) {
  LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
  cudaStream_t stream = device_->pipeline.computing();
  const DeviceBuffer& largest = pieces_largest_;
  LOSSD_CUDA_TRY(cudaMemsetAsync(largest.data(), 0, static_cast<size_t>(largest.bytes()), stream));
  if (config_.bias && stepped_.count > 0) {
    LOSSD_CUDA_PASS_ON(StepBias(SumOf(stepped_), coefficients));
  }
  const int32_t pieces = GatheredPieces();
  for (int32_t piece = 0; piece < pieces; ++piece) {
    const RowSpan rows = shard_.slices().Piece(shard_.replica, piece, pieces);
    float* const of_piece = Floats(largest) + int64_t{shard_.replica} * pieces + piece;
    if (rows.count > 0) LOSSD_CUDA_PASS_ON(StepMatrix(SumOf(rows), coefficients, of_piece));
    LOSSD_CUDA_PASS_ON(slices_.NoteStepped(piece, stream));
  }
  knows_pieces_largest_ = true;
  return {};
}

int32_t CudaBackend::GatheredPieces() const {
  return SlicePipeline::GatheredPieces(shard_.slices(), padded_hidden_, SizeOf(config_.weight_type));
}

absl::Status CudaBackend::GatherSlices(const ReplicaCommunicators& replicas) {
  if (absl::Status checked = CheckReplicas(shard_, replicas); !checked.ok()) return checked;
  Result result(cudaSetDevice(device_->index), "cudaSetDevice");
  if (!result.ok()) return DeviceFailed(result);
  cudaStream_t stream = device_->pipeline.computing();
  const absl::Status gathered = GatherPieces(replicas.device);
  // After a failure too: what is on the wires may still write to the weights.
  const Result joined = slices_.Join(stream);
  if (!gathered.ok()) return gathered;
  result = joined.ok() ? DeriveFromGathered() : joined;
  return result.ok() ? ToStatus(replicas.device->Wait(stream)) : DeviceFailed(result);
}

// A piece goes as soon as it is stepped, beside the step of the next one.
absl::Status CudaBackend::GatherPieces(Communicator* replicas) {
  const SliceLayout layout = shard_.slices();
  const int32_t pieces = GatheredPieces();
  SliceExchange matrix(layout, padded_hidden_, replicas);
  for (int32_t piece = 0; piece < pieces; ++piece) {
    Result behind;
    if (!knows_pieces_largest_) behind = slices_.NoteStepped(piece, device_->pipeline.computing());
    if (behind.ok()) behind = slices_.AwaitStepped(piece);
    if (!behind.ok()) return DeviceFailed(behind);
    absl::Status gathered =
        ToStatus(matrix.Gather(weights_.data(), SizeOf(config_.weight_type), piece, pieces, slices_.wires()));
    if (!gathered.ok()) return gathered;
  }
  absl::Status gathered;
  if (config_.bias) gathered = GatherFloats(layout, bias_, replicas);
  if (!gathered.ok()) return gathered;
  return GatherFloats({int64_t{layout.replicas()} * pieces, layout.replicas()}, pieces_largest_, replicas);
}

absl::Status CudaBackend::GatherFloats(const SliceLayout& layout, const DeviceBuffer& floats,
                                       Communicator* replicas) const {
  return ToStatus(
      SliceExchange(layout, 1, replicas).Gather(floats.data(), sizeof(float), 0, 1, slices_.wires()));
}

Result CudaBackend::DeriveFromGathered() {
  if (!knows_pieces_largest_) return DeriveFromWeights();
  LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(DataType::kFloat32, pieces_largest_.data(),
                                                     pieces_largest_.bytes() / int64_t{sizeof(float)},
                                                     Floats(weight_largest_), device_->pipeline.computing()));
  return DeriveFromBias();
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

}  // namespace lossd::engine
