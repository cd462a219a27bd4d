#include <thread>

#include "kernels/linear_cross_entropy.h"
#include "kernels/threads.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/device/device_kind.h"

namespace lossd::engine::cpu {
namespace {

bool Knows(absl::string_view name) { return name == "cpu"; }

absl::StatusOr<std::unique_ptr<Device>> Create(const DeviceOptions& options) {
  // At the first chunk it would be too late: the process would end with everybody's windows.
  std::thread(kernels::StartLoopThreads).join();
  return CreateCpuDevice(
      options.workspace_bytes == 0 ? kernels::kDefaultCpuWorkspaceBytes : options.workspace_bytes,
      options.staging_bytes);
}

int Accelerators() { return 0; }

}  // namespace

DeviceKind Kind() { return {&Knows, "cpu", &Create, &Accelerators}; }

}  // namespace lossd::engine::cpu
