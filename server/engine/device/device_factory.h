// Which device heads live on.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_DEVICE_FACTORY_H_
#define LOSSD_SERVER_ENGINE_DEVICE_DEVICE_FACTORY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine {

struct DeviceOptions {
  std::string name = "auto";    // auto, cpu, or cuda:N
  int64_t workspace_bytes = 0;  // 0: what suits the device
  int64_t staging_bytes = 0;    // of the host's memory that heads on the CPU leave to sessions
  int64_t pinned_bytes = 0;     // of a GPU: see CudaOptions
  ChunkLimits chunk_limits;
};

// Whether a name is one of those, whatever is there.
bool IsDeviceName(absl::string_view name);

struct ChosenDevice {
  std::unique_ptr<Device> device;
  std::string why_cpu;  // of auto: why there is no better one; else empty
};

// auto takes the first CUDA device that works, or else the CPU. FAILED_PRECONDITION if a device that was
// asked for by name is not there or this program was built without it; RESOURCE_EXHAUSTED if its memory is
// not.
absl::StatusOr<ChosenDevice> CreateDevice(const DeviceOptions& options);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_DEVICE_FACTORY_H_
