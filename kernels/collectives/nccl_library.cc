#include "kernels/collectives/nccl_library.h"

#include <dlfcn.h>
#include <stdlib.h>

#if __has_include(<nccl.h>)
#include <nccl.h>
#endif

namespace lossd::kernels::collectives {
namespace {

#if __has_include(<nccl.h>)
static_assert(sizeof(ncclUniqueId) == sizeof(NcclUniqueId));
static_assert(ncclSuccess == static_cast<int>(NcclStatus::kSuccess));
static_assert(ncclRemoteError == static_cast<int>(NcclStatus::kRemoteError));
static_assert(ncclInProgress == static_cast<int>(NcclStatus::kInProgress));
static_assert(ncclInt8 == NcclLibrary::kBytes);
static_assert(sizeof(ncclResult_t) == sizeof(NcclStatus) && sizeof(ncclDataType_t) == sizeof(int));
static_assert(NCCL_CONFIG_UNDEF_INT == NcclConfig::kUndefined);
static_assert(offsetof(ncclConfig_t, magic) == offsetof(NcclConfig, magic));
static_assert(offsetof(ncclConfig_t, version) == offsetof(NcclConfig, version));
static_assert(offsetof(ncclConfig_t, blocking) == offsetof(NcclConfig, blocking));
static_assert(offsetof(ncclConfig_t, netName) == offsetof(NcclConfig, net_name));
static_assert(offsetof(ncclConfig_t, splitShare) == offsetof(NcclConfig, split_share));
#endif

// It names kOldest.
constexpr char kHowToInstall[] =
    "install NCCL 2.18 or later (the package libnccl2 of NVIDIA's repository, or nvidia-nccl-cu13 of PyPI) "
    "where "
    "shared libraries are found, or name its folder in LD_LIBRARY_PATH";

// 22809 is 2.28.9.
std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

template <class Function>
bool FindSymbol(void* opened, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(opened, name));
  return *function != nullptr;
}

}  // namespace

const char* NcclLibrary::FindAll(void* opened) {
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto* function) {
    if (!FindSymbol(opened, name, function) && missing == nullptr) missing = name;
  };
  find("ncclGetVersion", &get_version);
  find("ncclGetUniqueId", &get_unique_id);
  find("ncclCommInitRankConfig", &init_rank);
  find("ncclCommGetAsyncError", &get_async_error);
  find("ncclCommFinalize", &finalize);
  find("ncclCommDestroy", &destroy);
  find("ncclCommAbort", &abort);
  find("ncclGroupStart", &group_start);
  find("ncclGroupEnd", &group_end);
  find("ncclSend", &send);
  find("ncclRecv", &receive);
  find("ncclGetErrorString", &error_string);
  find("ncclGetLastError", &last_error);
  return missing;
}

Result NcclLibrary::Open(const std::string& name, std::shared_ptr<const NcclLibrary>* library) {
  void* const opened = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    const char* const why = dlerror();
    return {Code::kUnavailable,
            "opening NCCL: " + std::string(why != nullptr ? why : name) + "; " + kHowToInstall};
  }
  std::shared_ptr<NcclLibrary> found(new NcclLibrary());
  const char* const missing = found->FindAll(opened);
  int version = 0;
  if (found->get_version != nullptr) (void)found->get_version(&version);
  if (missing != nullptr || version < kOldest) {
    std::string why = version == 0 ? name + " is not NCCL" : name + " is NCCL " + VersionText(version);
    if (missing != nullptr) why += std::string(" (there is no ") + missing + ")";
    return {Code::kUnavailable, why + "; " + kHowToInstall};
  }
  *library = std::move(found);
  return {};
}

std::string NcclLibrary::Describe(NcclStatus status, NcclComm* comm) const {
  std::string text = std::string("NCCL says: ") + error_string(status);
  const char* const last = last_error(comm);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return text;
}

}  // namespace lossd::kernels::collectives
