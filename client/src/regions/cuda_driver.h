// The few calls of the CUDA driver that regions of device memory need, found at run time: programs do not
// link against CUDA, and where there is none everything else works.
#ifndef LOSSD_CLIENT_SRC_REGIONS_CUDA_DRIVER_H_
#define LOSSD_CLIENT_SRC_REGIONS_CUDA_DRIVER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lossd::internal {

// Thread-safe. Works in each device's primary context, as the CUDA runtime does: its pointers and ours are
// the same.
class CudaDriver {
 public:
  // The process's one. FAILED_PRECONDITION saying why there is none.
  static absl::StatusOr<const CudaDriver*> Get();

  // Memory of another process, of the GPU at `bus_id`.
  absl::StatusOr<void*> Open(const std::string& ipc_handle, const std::string& bus_id) const;
  void Close(void* memory, const std::string& bus_id) const;

  // Blocking copies between this process's host memory and the device.
  absl::Status CopyToDevice(void* device, const void* host, int64_t bytes, const std::string& bus_id) const;
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes, const std::string& bus_id) const;

 private:
  CudaDriver() = default;
  absl::Status Load();
  class Context;  // of one device, for as long as it lives

  struct Functions;
  const Functions* functions_ = nullptr;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_REGIONS_CUDA_DRIVER_H_
