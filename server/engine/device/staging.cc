#include "server/engine/device/staging.h"

#include <optional>
#include <utility>

namespace lossd::engine {

Payload Staged(Payload payload, Device* device) {
  if (payload.place() != MemoryPlace::kHost || payload.size() < kLeastStagedBytes) return payload;
  std::optional<ResultBytes> bytes = device->RegisteredBytes(payload.size());
  if (!bytes.has_value()) return payload;
  Gather(payload.parts(), bytes->data());
  return Payload::Of(*bytes);
}

ResultBytes StagedResult(int64_t bytes, Device* device) {
  std::optional<ResultBytes> registered;
  if (device != nullptr && bytes >= kLeastStagedBytes) registered = device->RegisteredBytes(bytes);
  return registered.has_value() ? *std::move(registered) : ResultBytes(bytes);
}

}  // namespace lossd::engine
