// Page-locked memory for payloads and results: taken from the system once, given out in pieces.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_PINNED_POOL_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_PINNED_POOL_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"
#include "server/engine/common/mutex.h"
#include "server/engine/memory/arena.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine {

// Thread-safe. Pieces keep the pool's memory, and may outlive everything else.
class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  static kernels::cuda::Result Create(int64_t bytes, std::shared_ptr<PinnedPool>* pool);

  // Nothing if there is no room in one piece.
  std::optional<ResultBytes> Take(int64_t bytes);
  PoolUsage usage() const;

 private:
  PinnedPool(kernels::cuda::PinnedBuffer memory, int64_t bytes) : memory_(std::move(memory)), arena_(bytes) {}
  void Give(std::byte* data, int64_t bytes);

  const kernels::cuda::PinnedBuffer memory_;
  mutable Mutex mutex_;
  Arena arena_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_PINNED_POOL_H_
