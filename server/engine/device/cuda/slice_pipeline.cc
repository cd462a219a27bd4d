#include "server/engine/device/cuda/slice_pipeline.h"

#include <algorithm>

#include "kernels/cuda/optimizer/optimizer.h"
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
// millisecond, beside which starting an exchange is little; and a slice of a large head has eight of them or
// more, so that the first and the last, which overlap with nothing, are little too.
constexpr int64_t kMostPieceBytes = int64_t{64} << 20;
// Floats that one other replica gives to a piece of a sum: scratch memory has room for two pieces.
constexpr int64_t kMostGivenBytes = int64_t{16} << 20;

int32_t PiecesOf(const SliceLayout& layout, int64_t row_bytes, int64_t most_bytes) {
  const int64_t rows = kernels::CeilDivide(layout.rows(), layout.replicas());
  const int64_t bytes = rows * row_bytes * (layout.replicas() - 1);
  return static_cast<int32_t>(std::max<int64_t>(1, kernels::CeilDivide(bytes, most_bytes)));
}

int32_t SummedPieces(const SliceLayout& layout, int64_t columns) {
  const int64_t most = std::min(kMostPieceBytes, kMostGivenBytes * std::max(1, layout.replicas() - 1));
  return PiecesOf(layout, columns * int64_t{sizeof(float)}, most);
}

int64_t HalfBytes(const SliceLayout& layout, int32_t replica, int64_t columns) {
  const int32_t pieces = SummedPieces(layout, columns);
  return kernels::RoundUp(SliceExchange::ScratchBytes(layout, replica, columns, pieces), kAlignment);
}

}  // namespace

int64_t SlicePipeline::ScratchBytes(const SliceLayout& layout, int32_t replica, int64_t columns) {
  return std::max(2 * HalfBytes(layout, replica, columns), columns * int64_t{sizeof(float)});
}

int32_t SlicePipeline::GatheredPieces(const SliceLayout& layout, int64_t columns, int64_t entry_bytes) {
  return PiecesOf(layout, columns * entry_bytes, kMostPieceBytes);
}

Result SlicePipeline::Create(int64_t scratch_bytes, int32_t gathered_pieces) {
  LOSSD_CUDA_PASS_ON(Stream::CreateUrgent(&wires_));
  for (Event* event : {&begun_, &came_[0], &came_[1], &added_[0], &added_[1], &ended_}) {
    LOSSD_CUDA_PASS_ON(Event::Create(event));
  }
  stepped_.resize(static_cast<size_t>(gathered_pieces));
  for (Event& event : stepped_) LOSSD_CUDA_PASS_ON(Event::Create(&event));
  return DeviceBuffer::Create(scratch_bytes, &scratch_);
}

absl::Status SlicePipeline::Sum(const SliceLayout& layout, int64_t columns, Communicator* communicator,
                                const float* gradient, float* sum, cudaStream_t computing) {
  auto* const scratch = static_cast<char*>(scratch_.data());
  Work work{.exchange = SliceExchange(layout, columns, communicator),
            .pieces = SummedPieces(layout, columns),
            .gradient = gradient,
            .sum = sum,
            .halves = {scratch, scratch + HalfBytes(layout, communicator->rank(), columns)},
            .computing = computing};
  const absl::Status summed = SumPieces(work);
  // After a failure too: what is on the wires may still write to scratch memory.
  const Result joined = Join(computing);
  return summed.ok() ? DeviceFailed(joined) : summed;
}

absl::Status SlicePipeline::AddOne(const SliceLayout& layout, int64_t columns, Communicator* communicator,
                                   int32_t from, const float* gradient, float* sum, cudaStream_t computing) {
  SliceExchange exchange(layout, columns, communicator);
  const int32_t pieces = SummedPieces(layout, columns);
  for (int32_t piece = 0; piece < pieces; ++piece) {
    absl::Status sent = ToStatus(exchange.Send(gradient, from, piece, pieces, scratch_.data(), computing));
    if (!sent.ok()) return sent;
    const auto [rows, before] = exchange.OwnPiece(piece, pieces);
    if (rows.count == 0) continue;
    const bool own = communicator->rank() == from;
    const float* const values =
        own ? gradient + rows.first * columns : static_cast<const float*>(scratch_.data());
    const Result added =
        kernels::cuda::AddGradient(values, rows.count * columns, kernels::WeightGradient::kAccumulate,
                                   sum + before * columns, computing);
    if (!added.ok()) return DeviceFailed(added);
  }
  return absl::OkStatus();
}

absl::Status SlicePipeline::SumPieces(Work& work) {
  // The gradient is there, and whoever used the scratch memory is done.
  absl::Status status = DeviceFailed(Order(work.computing, begun_, wires_.get()));
  for (int32_t piece = 0; status.ok() && piece < work.pieces; ++piece) status = Take(work, piece);
  return status;
}

absl::Status SlicePipeline::Take(Work& work, int32_t piece) {
  const auto half = static_cast<size_t>(piece % 2);
  void* const scratch = work.halves[half];
  if (piece >= 2) {  // whose half of the scratch memory is to be free
    const Result behind(cudaStreamWaitEvent(wires_.get(), added_[half].get(), 0), "cudaStreamWaitEvent");
    if (!behind.ok()) return DeviceFailed(behind);
  }
  absl::Status status =
      ToStatus(work.exchange.Give(work.gradient, piece, work.pieces, scratch, wires_.get()));
  if (!status.ok()) return status;
  status = DeviceFailed(Order(wires_.get(), came_[half], work.computing));
  if (!status.ok()) return status;
  status = ToStatus(work.exchange.Add(work.gradient, piece, work.pieces, work.sum, scratch, work.computing));
  if (!status.ok()) return status;
  return DeviceFailed({cudaEventRecord(added_[half].get(), work.computing), "cudaEventRecord"});
}

Result SlicePipeline::NoteStepped(int32_t piece, cudaStream_t computing) {
  LOSSD_CUDA_TRY(cudaEventRecord(stepped_[static_cast<size_t>(piece)].get(), computing));
  return {};
}

Result SlicePipeline::AwaitStepped(int32_t piece) {
  LOSSD_CUDA_TRY(cudaStreamWaitEvent(wires_.get(), stepped_[static_cast<size_t>(piece)].get(), 0));
  return {};
}

Result SlicePipeline::Join(cudaStream_t computing) { return Order(wires_.get(), ended_, computing); }

}  // namespace lossd::engine
