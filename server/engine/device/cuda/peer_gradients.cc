#include "server/engine/device/cuda/peer_gradients.h"

#include <algorithm>
#include <utility>

#include "server/engine/device/cuda/cuda_status.h"
#include "server/engine/device/cuda/stream_order.h"
#include "server/engine/device/rank_status.h"

namespace lossd::engine {

using kernels::collectives::Communicator;
using kernels::collectives::Reduction;
using kernels::cuda::Event;
using kernels::cuda::PeerMemory;
using kernels::cuda::Result;
using kernels::cuda::Stream;

namespace {

// A head has two gradients where it has a second one, and each may meet each of the other's.
constexpr size_t kMostMet = 4;

}  // namespace

Result PeerGradients::Create(Communicator* communicator, std::shared_ptr<PeerGradients>* peers) {
  std::shared_ptr<PeerGradients> made(new PeerGradients(communicator));
  LOSSD_CUDA_TRY(cudaGetDevice(&made->device_));
  LOSSD_CUDA_PASS_ON(Stream::CreateUrgent(&made->pulling_));
  LOSSD_CUDA_PASS_ON(Event::Create(&made->begun_));
  LOSSD_CUDA_PASS_ON(Event::Create(&made->pulled_));
  *peers = std::move(made);
  return {};
}

absl::Status PeerGradients::Meet(const Own& own, cudaStream_t stream, const PeerMemory** reached) {
  *reached = nullptr;
  if (out_of_reach_) return absl::OkStatus();
  std::vector<int64_t> numbers(static_cast<size_t>(communicator_.size()));
  numbers[static_cast<size_t>(communicator_.rank())] = own.number;
  const absl::Status met = ToStatus(communicator_.AllReduce(Reduction::kSum, numbers, stream));
  if (!met.ok()) return met;
  auto known = std::find_if(met_.begin(), met_.end(), [&](const Met& one) { return one.numbers == numbers; });
  if (known == met_.end()) {
    PeerMemory memory;
    const Result created = PeerMemory::Create(&communicator_, own.memory, own.bytes, stream, &memory,
                                              PeerMemory::Among::kThreadsToo);
    if (!created.ok()) return DeviceFailed(created, &communicator_);
    out_of_reach_ = !memory.IsReached();
    if (out_of_reach_) return absl::OkStatus();
    if (met_.size() == kMostMet) met_.pop_front();
    met_.push_back({std::move(numbers), std::move(memory)});
    known = std::prev(met_.end());
  }
  *reached = &known->memory;
  return absl::OkStatus();
}

Result PeerGradients::BeginPulling(cudaStream_t computing) {
  return Order(computing, begun_, pulling_.get());
}

Result PeerGradients::Pull(const void* from, void* to, int64_t bytes, cudaStream_t computing) {
  if (bytes == 0) return {};
  LOSSD_CUDA_TRY(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, pulling_.get()));
  return Order(pulling_.get(), pulled_, computing);
}

void PeerGradients::Close() {
  if (met_.empty()) return;
  int current = 0;
  (void)cudaGetDevice(&current);
  (void)cudaSetDevice(device_);
  // What is pulled waits for nobody: this ends soon, whatever has become of the others.
  (void)cudaStreamSynchronize(pulling_.get());
  met_.clear();
  (void)cudaSetDevice(current);
}

}  // namespace lossd::engine
