#include "server/engine/deferred_operands.h"

#include <utility>

namespace lossd::engine {

absl::StatusOr<std::shared_ptr<DeferredOperands>> DeferredOperands::Create(Device* device, int64_t bytes) {
  absl::StatusOr<std::shared_ptr<RegionMemory>> memory =
      device->CreateRegionMemory(RegionKind::kSystem, device->RegionBytes(RegionKind::kSystem, bytes));
  if (!memory.ok()) return memory.status();
  return std::shared_ptr<DeferredOperands>(new DeferredOperands(*std::move(memory)));
}

std::optional<Payload> DeferredOperands::Keep(const Payload& payload, int64_t more) {
  const int64_t bytes = payload.size() + more;
  std::optional<int64_t> offset;
  {
    const std::lock_guard lock(mutex_);
    offset = arena_.Take(bytes);
  }
  if (!offset.has_value()) return std::nullopt;
  std::byte* data = memory_->data() + *offset;
  Gather(payload.parts(), data);
  std::shared_ptr<std::byte[]> piece(
      data, [store = shared_from_this(), bytes](const std::byte* kept) { store->Give(kept, bytes); });
  return Payload::Of(ResultBytes(std::move(piece), payload.size(), memory_->place()));
}

void DeferredOperands::Give(const std::byte* data, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  arena_.Give(data - memory_->data(), bytes);
}

}  // namespace lossd::engine
