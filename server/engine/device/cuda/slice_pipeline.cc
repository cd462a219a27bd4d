#include "server/engine/device/cuda/slice_pipeline.h"

#include <algorithm>

#include "kernels/rounding.h"
#include "server/engine/device/cuda/cuda_status.h"
#include "server/engine/device/cuda/stream_order.h"
#include "server/engine/device/rank_status.h"

namespace lossd::engine {

using kernels::SliceLayout;
using kernels::collectives::Communicator;
using kernels::collectives::SliceExchange;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Event;
using kernels::cuda::Result;
using kernels::cuda::Stream;

namespace {

constexpr int64_t kAlignment = 256;
// What comes to a replica in one piece, of all others together. NVLink carries it in a fifth of a
// millisecond, beside which starting an exchange is little; and a slice of a large head has a dozen of them,
// so that the first and the last, which overlap with nothing, are little too.
constexpr int64_t kMostPieceBytes = int64_t{64} << 20;

// The same at every replica.
int32_t PiecesOf(const SliceLayout& layout, int64_t columns) {
  const int64_t rows = kernels::CeilDivide(layout.rows(), layout.replicas());
  const int64_t bytes = rows * columns * int64_t{sizeof(float)} * (layout.replicas() - 1);
  return static_cast<int32_t>(std::max<int64_t>(1, kernels::CeilDivide(bytes, kMostPieceBytes)));
}

int64_t HalfBytes(const SliceLayout& layout, int32_t replica, int64_t columns) {
  return kernels::RoundUp(SliceExchange::ScratchBytes(layout, replica, columns, PiecesOf(layout, columns)),
                          kAlignment);
}

}  // namespace

int64_t SlicePipeline::ScratchBytes(const SliceLayout& layout, int32_t replica, int64_t columns) {
  return std::max(2 * HalfBytes(layout, replica, columns), columns * int64_t{sizeof(float)});
}

Result SlicePipeline::Create(int64_t scratch_bytes) {
  LOSSD_CUDA_PASS_ON(Stream::CreateUrgent(&wires_));
  for (Event* event : {&begun_, &came_[0], &came_[1], &added_[0], &added_[1], &ended_}) {
    LOSSD_CUDA_PASS_ON(Event::Create(event));
  }
  return DeviceBuffer::Create(scratch_bytes, &scratch_);
}

absl::Status SlicePipeline::Sum(const SliceLayout& layout, int64_t columns, Communicator* communicator,
                                const float* gradient, const Sums& sums, cudaStream_t computing) {
  auto* const scratch = static_cast<char*>(scratch_.data());
  Work work{.exchange = SliceExchange(layout, columns, communicator),
            .pieces = PiecesOf(layout, columns),
            .gradient = gradient,
            .sums = sums,
            .halves = {scratch, scratch + HalfBytes(layout, communicator->rank(), columns)},
            .computing = computing};
  const absl::Status summed = SumPieces(work);
  // After a failure too: what is on the wires may still write to the sums.
  const Result joined = Order(wires_.get(), ended_, computing);
  return summed.ok() ? DeviceFailed(joined) : summed;
}

absl::Status SlicePipeline::SumPieces(Work& work) {
  // The gradient is there, and whoever used sums and scratch memory is done.
  absl::Status status = DeviceFailed(Order(work.computing, begun_, wires_.get()));
  for (int32_t piece = 0; status.ok() && piece < work.pieces + 2; ++piece) {
    if (piece >= 2) status = SendOn(work, piece - 2);
    if (status.ok() && piece < work.pieces) status = Take(work, piece);
  }
  return status;
}

absl::Status SlicePipeline::Take(Work& work, int32_t piece) {
  const auto half = static_cast<size_t>(piece % 2);
  void* const scratch = work.halves[half];
  absl::Status status =
      ToStatus(work.exchange.Give(work.gradient, piece, work.pieces, scratch, wires_.get()));
  if (!status.ok()) return status;
  status = DeviceFailed(Order(wires_.get(), came_[half], work.computing));
  if (!status.ok()) return status;
  status = ToStatus(work.exchange.Add(work.gradient, piece, work.pieces, work.sums, scratch, work.computing));
  if (!status.ok()) return status;
  return DeviceFailed({cudaEventRecord(added_[half].get(), work.computing), "cudaEventRecord"});
}

// That the addition is done frees its half of the scratch memory too, for the piece that is next on the
// wires.
absl::Status SlicePipeline::SendOn(Work& work, int32_t piece) {
  const cudaEvent_t added = added_[static_cast<size_t>(piece % 2)].get();
  const Result behind(cudaStreamWaitEvent(wires_.get(), added, 0), "cudaStreamWaitEvent");
  if (!behind.ok()) return DeviceFailed(behind);
  return ToStatus(work.exchange.SendOn(piece, work.pieces, work.sums, wires_.get()));
}

}  // namespace lossd::engine
