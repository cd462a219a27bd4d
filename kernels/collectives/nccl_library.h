// NCCL, opened at run time: programs start, and CPUs compute, without it.
//
// The CUDA toolkit that lossd is built with need not have NCCL's header, so what is called of it is declared
// here, after its reference (docs.nvidia.com, "NCCL API") as of 2.18. Later libraries of version 2 keep to
// it: functions and codes stay, and a configuration says how large it is and which version wrote it. Where
// there is an <nccl.h>, nccl_library.cc compares.
#ifndef LOSSD_KERNELS_COLLECTIVES_NCCL_LIBRARY_H_
#define LOSSD_KERNELS_COLLECTIVES_NCCL_LIBRARY_H_

#include <cuda_runtime_api.h>

#include <climits>
#include <cstddef>
#include <memory>
#include <string>

#include "kernels/collectives/result.h"

namespace lossd::kernels::collectives {

// A communicator as NCCL has it.
struct NcclComm;

struct NcclUniqueId {
  char bytes[128];
};

// Codes of NCCL's calls: those that are told apart here.
enum class NcclStatus : int { kSuccess = 0, kRemoteError = 6, kInProgress = 7 };

// The configuration as 2.18 has it, with nothing chosen.
struct NcclConfig {
  static constexpr int kUndefined = INT_MIN;

  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

// The functions of the library. Const and used by many communicators; each communicator has a lock of its
// own.
class NcclLibrary {
 public:
  static constexpr int kOldest = 21800;  // 2.18.0
  static constexpr int kBytes = 0;       // the data type of a byte

  // Fails with kUnavailable, and a message that says what is missing and how it is installed, or what version
  // was found. PrepareNccl comes before it.
  static Result Open(const std::string& name, std::shared_ptr<const NcclLibrary>* library);

  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;
  // The library stays open: its threads may outlast a communicator that was aborted.
  ~NcclLibrary() = default;

  // What NCCL says of an error, with its last words on it. `comm` may be null.
  std::string Describe(NcclStatus status, NcclComm* comm) const;

  NcclStatus (*get_version)(int* version) = nullptr;
  NcclStatus (*get_unique_id)(NcclUniqueId* id) = nullptr;
  NcclStatus (*init_rank)(NcclComm** comm, int ranks, NcclUniqueId id, int rank,
                          NcclConfig* config) = nullptr;
  NcclStatus (*get_async_error)(NcclComm* comm, NcclStatus* status) = nullptr;
  NcclStatus (*finalize)(NcclComm* comm) = nullptr;
  NcclStatus (*destroy)(NcclComm* comm) = nullptr;
  NcclStatus (*abort)(NcclComm* comm) = nullptr;
  NcclStatus (*group_start)() = nullptr;
  NcclStatus (*group_end)() = nullptr;
  NcclStatus (*send)(const void* data, size_t count, int type, int peer, NcclComm* comm,
                     cudaStream_t stream) = nullptr;
  NcclStatus (*receive)(void* data, size_t count, int type, int peer, NcclComm* comm,
                        cudaStream_t stream) = nullptr;
  const char* (*error_string)(NcclStatus status) = nullptr;
  const char* (*last_error)(NcclComm* comm) = nullptr;

 private:
  NcclLibrary() = default;
  // The name of the function that the library lacks; null if it has all.
  const char* FindAll(void* opened);
};

}  // namespace lossd::kernels::collectives

#endif  // LOSSD_KERNELS_COLLECTIVES_NCCL_LIBRARY_H_
