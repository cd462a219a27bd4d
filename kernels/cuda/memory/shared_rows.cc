#include "kernels/cuda/memory/shared_rows.h"

#include <algorithm>
#include <utility>

namespace lossd::kernels::cuda {

Result SharedRows::Create(collectives::Communicator* communicator) {
  communicator_ = communicator;
  times_.assign(static_cast<size_t>(communicator->size()), 0);
  const auto bytes = static_cast<int64_t>(times_.size() * sizeof(uint32_t));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(bytes, &arrived_));
  LOSSD_CUDA_TRY(cudaMemset(arrived_.data(), 0, static_cast<size_t>(bytes)));
  LOSSD_CUDA_TRY(cudaDeviceSynchronize());
  LOSSD_CUDA_PASS_ON(PeerMemory::Create(communicator, arrived_.data(), bytes, nullptr, &arrivals_));
  copied_ = arrivals_.IsReached();
  return {};
}

Result SharedRows::Add(void* memory, int64_t bytes, cudaStream_t stream) {
  PeerMemory peers;
  LOSSD_CUDA_PASS_ON(PeerMemory::Create(communicator_, memory, bytes, stream, &peers));
  copied_ = copied_ && peers.IsReached();
  memories_.push_back(std::move(peers));
  return {};
}

Result SharedRows::Share(int source, void* place, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return {};
  if (!copied_) {
    std::vector<int64_t> counts(static_cast<size_t>(communicator_->size()));
    counts[static_cast<size_t>(source)] = bytes;
    const collectives::Result sent = communicator_->AllGatherV(place, counts, place, stream);
    return sent.ok() ? Result() : Result(cudaErrorExternalDevice, "sending rows to all ranks");
  }
  const uint32_t times = ++times_[static_cast<size_t>(source)];
  if (communicator_->rank() == source) return Send(place, bytes, stream);
  return AwaitFlag(stream, Arrived(source), times);
}

Result SharedRows::Send(void* place, int64_t bytes, cudaStream_t stream) {
  const auto memory = std::find_if(memories_.begin(), memories_.end(),
                                   [place](const PeerMemory& peers) { return peers.Has(place); });
  if (memory == memories_.end()) return {cudaErrorInvalidValue, "rows in memory that ranks share"};
  const int own = communicator_->rank();
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    if (rank == own) continue;
    LOSSD_CUDA_TRY(cudaMemcpyAsync(memory->At(rank, place), place, static_cast<size_t>(bytes),
                                   cudaMemcpyDefault, stream));
    LOSSD_CUDA_PASS_ON(SetFlag(stream, arrivals_.At(rank, Arrived(own)), times_[static_cast<size_t>(own)]));
  }
  return {};
}

}  // namespace lossd::kernels::cuda
