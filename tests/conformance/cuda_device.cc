#include "server/engine/device/cuda/cuda_device.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "kernels/collectives/nccl_communicator.h"
#include "tests/conformance/device_under_test.h"
#include "tests/conformance/rank_threads.h"

namespace lossd::engine::testing {
namespace {

absl::StatusOr<std::unique_ptr<Device>> CreateCuda(int index, int64_t workspace_bytes, CudaPath path) {
  return CreateCudaDevice(
      index, {.workspace_bytes = workspace_bytes,
              .chunk_limits = {.max_chunk_bytes = kMaxChunkBytes, .max_chunk_tokens = kMaxChunkTokens},
              .path = path});
}

template <CudaPath kPath>
absl::StatusOr<std::unique_ptr<Device>> Create(int64_t workspace_bytes) {
  return CreateCuda(0, workspace_bytes, kPath);
}

// Ranks of one process do not reach each other's memory: all that travels does so by NCCL.
constexpr int32_t kRanks = 2;
absl::StatusOr<std::unique_ptr<Device>> CreateRanks(int64_t workspace_bytes, int32_t holder) {
  if (CudaDeviceCount() < kRanks) {
    return absl::FailedPreconditionError(absl::StrCat("there are no ", kRanks, " GPUs"));
  }
  return CreateRankThreads(
      {.ranks = kRanks,
       .create =
           [workspace_bytes](int32_t rank) { return CreateCuda(rank, workspace_bytes, CudaPath::kFastest); },
       .connect =
           [](int32_t rank, kernels::collectives::Rendezvous& rendezvous,
              std::unique_ptr<kernels::collectives::Communicator>* communicator) {
             return kernels::collectives::ConnectNccl(
                 {.rank = rank, .size = kRanks, .device = rank, .timeout = std::chrono::minutes(10)},
                 rendezvous, communicator);
           },
       .holder = [holder](uint64_t batch) { return batch % 3 == 2 ? 0 : holder; }});
}

}  // namespace

std::vector<DeviceUnderTest> DevicesUnderTest() {
  const auto gradient_error = [](kernels::DataType type) {
    return type == kernels::DataType::kFloat32 ? 1e-5 : type == kernels::DataType::kBFloat16 ? 4e-3 : 1e-3;
  };
  const auto only_fp32 = [](kernels::DataType type) { return type == kernels::DataType::kFloat32; };
  const auto always = [](kernels::DataType /*type*/) { return true; };
  return {{.name = "cuda",
           .create = &Create<CudaPath::kFastest>,
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = only_fp32,
           .oracle = Oracle::kCpuInFloat32},
          {.name = "cudaPortable",
           .create = &Create<CudaPath::kPortable>,
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = always,
           .oracle = Oracle::kCpuInFloat32},
          {.name = "cudaRanks",
           .create = [](int64_t workspace_bytes) { return CreateRanks(workspace_bytes, 0); },
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = only_fp32,
           .ranks = kRanks,
           .oracle = Oracle::kCpuInFloat32,
           .judged_closely = false},
          {.name = "cudaHeld",
           .create = [](int64_t workspace_bytes) { return CreateRanks(workspace_bytes, 1); },
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = only_fp32,
           .ranks = kRanks,
           .oracle = Oracle::kCpuInFloat32,
           .judged_closely = false}};
}

}  // namespace lossd::engine::testing
