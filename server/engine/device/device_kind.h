// What a folder of server/engine/device/ offers, and how device_factory.cc finds it.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_DEVICE_KIND_H_
#define LOSSD_SERVER_ENGINE_DEVICE_DEVICE_KIND_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine {

struct DeviceOptions {
  std::string name = "auto";    // auto, or what a kind knows: cpu, cuda:N
  int64_t workspace_bytes = 0;  // 0: what suits the device
  int64_t staging_bytes = 0;    // of the host's memory that heads on the CPU leave to sessions
  int64_t pinned_bytes = 0;     // of a GPU: see CudaOptions
  ChunkLimits chunk_limits;
};

// Each folder FOLDER defines `DeviceKind lossd::engine::FOLDER::Kind()`.
struct DeviceKind {
  // Whether `name` is one of this kind's, whatever this machine has.
  bool (*knows)(absl::string_view name);
  // The name that auto tries.
  const char* automatic;
  // `options.name` is one that it knows. FAILED_PRECONDITION if there is no such device, or if this program
  // was built without it; RESOURCE_EXHAUSTED if its memory is not there.
  absl::StatusOr<std::unique_ptr<Device>> (*create)(const DeviceOptions& options);
  // How many accelerators of this kind this machine has; the CPU is none.
  int (*accelerators)();
};

// All kinds, in the order in which auto tries them. CMakeLists.txt makes the source from its list of folders.
std::span<const DeviceKind> DeviceKinds();

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_DEVICE_KIND_H_
