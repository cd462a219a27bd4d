// Where payloads and results lie on their way to the device and back: in memory that it copies from and to by
// itself, if it has such memory and they are worth it.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_STAGING_H_
#define LOSSD_SERVER_ENGINE_DEVICE_STAGING_H_

#include <cstdint>

#include "server/engine/device/head_backend.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine {

// Smaller pieces go through memory of their batch, many in one copy.
inline constexpr int64_t kLeastStagedBytes = int64_t{64} << 10;

// The payload as it is, or the same bytes in the device's memory, copied by the calling thread.
Payload Staged(Payload payload, Device* device);

// In memory of `device`; without one, or where pieces are small, on the heap.
ResultBytes StagedResult(int64_t bytes, Device* device);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_STAGING_H_
