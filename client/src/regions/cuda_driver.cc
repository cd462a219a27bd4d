#include "client/src/regions/cuda_driver.h"

#include <dlfcn.h>

#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"

namespace lossd::internal {
namespace {

// The driver's binary interface (cuda.h), as far as it is used here; it does not change.
using Code = int;
using Device = int;
using ContextHandle = void*;
using DevicePointer = unsigned long long;  // NOLINT(google-runtime-int): the driver's own type
constexpr unsigned kLazyPeerAccess = 1;

}  // namespace

struct CudaDriver::Functions {
  struct IpcHandle {
    char reserved[64];
  };

  Code (*init)(unsigned) = nullptr;
  Code (*get_device)(Device*, const char*) = nullptr;
  Code (*retain_context)(ContextHandle*, Device) = nullptr;
  Code (*release_context)(Device) = nullptr;
  Code (*push_context)(ContextHandle) = nullptr;
  Code (*pop_context)(ContextHandle*) = nullptr;
  Code (*open)(DevicePointer*, IpcHandle, unsigned) = nullptr;
  Code (*close)(DevicePointer) = nullptr;
  Code (*to_device)(DevicePointer, const void*, size_t) = nullptr;
  Code (*to_host)(void*, DevicePointer, size_t) = nullptr;
  Code (*error_name)(Code, const char**) = nullptr;

  absl::Status Check(Code code, const char* what) const {
    if (code == 0) return absl::OkStatus();
    const char* name = nullptr;
    (void)error_name(code, &name);
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": ", name == nullptr ? absl::StrCat("CUDA error ", code) : name));
  }
};

// Makes the device's primary context the thread's.
class CudaDriver::Context {
 public:
  Context(const Functions& cuda, const std::string& bus_id) : cuda_(cuda) {
    status_ = cuda_.Check(cuda_.get_device(&device_, bus_id.c_str()),
                          "this process does not see the server's GPU (CUDA_VISIBLE_DEVICES?)");
    if (!status_.ok()) return;
    ContextHandle context = nullptr;
    status_ = cuda_.Check(cuda_.retain_context(&context, device_), "cuDevicePrimaryCtxRetain");
    if (!status_.ok()) return;
    retained_ = true;
    status_ = cuda_.Check(cuda_.push_context(context), "cuCtxPushCurrent");
    pushed_ = status_.ok();
  }
  ~Context() {
    ContextHandle ignored = nullptr;
    if (pushed_) (void)cuda_.pop_context(&ignored);
    if (retained_ && !keep_) (void)cuda_.release_context(device_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const absl::Status& status() const { return status_; }
  // The device's context outlives this object by one reference.
  void Keep() { keep_ = true; }
  // Gives such a reference back.
  void GiveBack() const { (void)cuda_.release_context(device_); }

 private:
  const Functions& cuda_;
  absl::Status status_;
  Device device_ = 0;
  bool retained_ = false;
  bool pushed_ = false;
  bool keep_ = false;
};

absl::StatusOr<const CudaDriver*> CudaDriver::Get() {
  // Never freed: memory that was opened may be closed at the very end.
  static const auto& loaded = *[] {
    std::unique_ptr<CudaDriver> driver(new CudaDriver());
    const absl::Status status = driver->Load();
    return status.ok() ? new absl::StatusOr<const CudaDriver*>(driver.release())
                       : new absl::StatusOr<const CudaDriver*>(status);
  }();
  return loaded;
}

absl::Status CudaDriver::Load() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        "regions of device memory need the CUDA driver here, and libcuda.so.1 is not there; use system "
        "memory");
  }
  static Functions cuda;
  bool complete = true;
  const auto find = [library, &complete](const char* name, auto* function) {
    void* const symbol = dlsym(library, name);
    complete = complete && symbol != nullptr;
    static_assert(sizeof(*function) == sizeof(symbol));
    // NOLINTNEXTLINE(bugprone-bitwise-pointer-cast,bugprone-multi-level-implicit-pointer-conversion)
    std::memcpy(function, &symbol, sizeof(symbol));
  };
  find("cuInit", &cuda.init);
  find("cuDeviceGetByPCIBusId", &cuda.get_device);
  find("cuDevicePrimaryCtxRetain", &cuda.retain_context);
  find("cuDevicePrimaryCtxRelease_v2", &cuda.release_context);
  find("cuCtxPushCurrent_v2", &cuda.push_context);
  find("cuCtxPopCurrent_v2", &cuda.pop_context);
  find("cuIpcOpenMemHandle_v2", &cuda.open);
  find("cuIpcCloseMemHandle", &cuda.close);
  find("cuMemcpyHtoD_v2", &cuda.to_device);
  find("cuMemcpyDtoH_v2", &cuda.to_host);
  find("cuGetErrorName", &cuda.error_name);
  if (!complete) return absl::FailedPreconditionError("libcuda.so.1 lacks calls for regions; it is too old");
  functions_ = &cuda;
  return cuda.Check(cuda.init(0), "the CUDA driver does not start");
}

absl::StatusOr<void*> CudaDriver::Open(const std::string& ipc_handle, const std::string& bus_id) const {
  Functions::IpcHandle handle{};
  if (ipc_handle.size() != sizeof(handle.reserved)) {
    return absl::InternalError(
        absl::StrCat("the server's device handle has ", ipc_handle.size(), " bytes, not 64"));
  }
  std::memcpy(handle.reserved, ipc_handle.data(), ipc_handle.size());
  Context context(*functions_, bus_id);
  if (!context.status().ok()) return context.status();
  DevicePointer pointer = 0;
  absl::Status status = functions_->Check(
      functions_->open(&pointer, handle, kLazyPeerAccess),
      "cannot open the server's device memory (client and server must share the GPU, and in "
      "containers the IPC and PID namespaces)");
  if (!status.ok()) return status;
  context.Keep();
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are numbers
  return reinterpret_cast<void*>(pointer);
}

void CudaDriver::Close(void* memory, const std::string& bus_id) const {
  const Context context(*functions_, bus_id);
  if (!context.status().ok()) return;
  (void)functions_->close(reinterpret_cast<DevicePointer>(memory));
  context.GiveBack();
}

absl::Status CudaDriver::CopyToDevice(void* device, const void* host, int64_t bytes,
                                      const std::string& bus_id) const {
  const Context context(*functions_, bus_id);
  if (!context.status().ok()) return context.status();
  return functions_->Check(
      functions_->to_device(reinterpret_cast<DevicePointer>(device), host, static_cast<size_t>(bytes)),
      "cuMemcpyHtoD");
}

absl::Status CudaDriver::CopyToHost(void* host, const void* device, int64_t bytes,
                                    const std::string& bus_id) const {
  const Context context(*functions_, bus_id);
  if (!context.status().ok()) return context.status();
  return functions_->Check(
      functions_->to_host(host, reinterpret_cast<DevicePointer>(device), static_cast<size_t>(bytes)),
      "cuMemcpyDtoH");
}

}  // namespace lossd::internal
