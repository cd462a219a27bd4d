// Host memory of a head for the operands of chunks whose dW is deferred: taken from the system when the head
// is created, in the device's own way, so that it copies from there by itself.
#ifndef LOSSD_SERVER_ENGINE_DEFERRED_OPERANDS_H_
#define LOSSD_SERVER_ENGINE_DEFERRED_OPERANDS_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/statusor.h"
#include "server/engine/arena.h"
#include "server/engine/head_backend.h"
#include "server/engine/payload.h"
#include "server/engine/region_memory.h"

namespace lossd::engine {

// Thread-safe. What is kept keeps the memory, and may outlive everything but the device.
class DeferredOperands : public std::enable_shared_from_this<DeferredOperands> {
 public:
  // RESOURCE_EXHAUSTED if the system does not give the memory.
  static absl::StatusOr<std::shared_ptr<DeferredOperands>> Create(Device* device, int64_t bytes);

  // A copy of the payload, which the host can read, in one piece; nothing if there is no room for it and for
  // `more` bytes that the caller keeps with it. Gives its room back when it goes.
  std::optional<Payload> Keep(const Payload& payload, int64_t more);

 private:
  explicit DeferredOperands(std::shared_ptr<RegionMemory> memory)
      : memory_(std::move(memory)), arena_(memory_->size()) {}
  void Give(const std::byte* data, int64_t bytes);

  const std::shared_ptr<RegionMemory> memory_;
  std::mutex mutex_;
  Arena arena_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEFERRED_OPERANDS_H_
