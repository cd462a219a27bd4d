// Which device heads live on.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_DEVICE_FACTORY_H_
#define LOSSD_SERVER_ENGINE_DEVICE_DEVICE_FACTORY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/device/device_kind.h"

namespace lossd::engine {

// Whether a name is auto or one that a kind of device knows, whatever is there.
bool IsDeviceName(absl::string_view name);

// "cpu" of "cpu", "cuda" of "cuda:1": a group's ranks have devices of one kind.
std::string KindOf(absl::string_view name);

// Names of all accelerators of this machine, "cuda:0", "cuda:1". Their driver stays in the process.
std::vector<std::string> AllAccelerators();

struct ChosenDevice {
  std::unique_ptr<Device> device;
  std::string why_cpu;  // of auto: why there is no better one; else empty
};

// auto takes the first kind of device that works: a GPU, or else the CPU. FAILED_PRECONDITION if a device
// that was asked for by name is not there or this program was built without it; RESOURCE_EXHAUSTED if its
// memory is not; INVALID_ARGUMENT if no kind knows the name.
absl::StatusOr<ChosenDevice> CreateDevice(const DeviceOptions& options);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_DEVICE_FACTORY_H_
