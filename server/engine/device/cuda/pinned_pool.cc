#include "server/engine/device/cuda/pinned_pool.h"

#include <utility>

namespace lossd::engine {

using kernels::cuda::PinnedBuffer;
using kernels::cuda::Result;

Result PinnedPool::Create(int64_t bytes, std::shared_ptr<PinnedPool>* pool) {
  PinnedBuffer memory;
  LOSSD_CUDA_PASS_ON(PinnedBuffer::Create(bytes, &memory));
  pool->reset(new PinnedPool(std::move(memory), bytes));
  return {};
}

std::optional<ResultBytes> PinnedPool::Take(int64_t bytes) {
  std::optional<int64_t> offset;
  {
    const MutexLock lock(mutex_);
    offset = arena_.Take(bytes);
  }
  if (!offset.has_value()) return std::nullopt;
  auto* data = static_cast<std::byte*>(memory_.data()) + *offset;
  std::shared_ptr<std::byte[]> piece(
      data, [pool = shared_from_this(), bytes](std::byte* given) { pool->Give(given, bytes); });
  return ResultBytes(std::move(piece), bytes, MemoryPlace::kRegisteredHost);
}

PoolUsage PinnedPool::usage() const {
  const MutexLock lock(mutex_);
  return arena_.usage();
}

void PinnedPool::Give(std::byte* data, int64_t bytes) {
  const MutexLock lock(mutex_);
  arena_.Give(data - static_cast<std::byte*>(memory_.data()), bytes);
}

}  // namespace lossd::engine
