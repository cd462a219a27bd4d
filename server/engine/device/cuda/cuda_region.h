// Memory that a CUDA device's server shares with clients on the same host.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_REGION_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_REGION_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/engine/regions/region_memory.h"

namespace lossd::engine {

// Regions of device memory are a multiple of this: what cudaIpcGetMemHandle lends is whole blocks of the
// driver, and no block may hold two regions.
inline constexpr int64_t kDeviceRegionBytes = int64_t{2} << 20;

// Memory of device `index` that another process opens by its IPC handle. RESOURCE_EXHAUSTED if it is not
// there, FAILED_PRECONDITION if the device cannot share it.
absl::StatusOr<std::shared_ptr<RegionMemory>> CreateCudaDeviceRegion(int index, int64_t bytes);

// The host's, known to the device, which then copies from and to it by itself. Where that cannot be done it
// stays plain memory.
absl::StatusOr<std::shared_ptr<RegionMemory>> CreateCudaHostRegion(int index, int64_t bytes);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_REGION_H_
