// Replicas on GPUs: all on one, between whose memories a communicator of the tests copies, so that any number
// of them can be tried anywhere; and on one each, connected by NCCL.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "kernels/collectives/communicator.h"
#include "kernels/collectives/nccl_communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "server/engine/device/cuda/cuda_device.h"
#include "tests/conformance/replicas/replicas_under_test.h"
#include "tests/gpu/device_ranks.h"
#include "tests/unit/kernels/thread_ranks.h"

namespace lossd::engine::testing {
namespace {

using kernels::collectives::Communicator;
using kernels::collectives::Result;
using kernels::testing::DeviceRanks;
using kernels::testing::RunOnThreads;

constexpr char kOneEach[] = "cudaNccl";
constexpr int32_t kMostOnOneGpu = 4;

bool IsOneEach(const DeviceUnderTest& which) { return which.name == kOneEach; }

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

// Where NCCL's ranks meet: what Gloo connects already.
class HostRendezvous final : public kernels::collectives::Rendezvous {
 public:
  explicit HostRendezvous(Communicator& host) : host_(host) {}

  Result AllGather(std::string own, std::chrono::milliseconds /*timeout*/,
                   std::vector<std::string>* all) override {
    const auto ranks = static_cast<size_t>(host_.size());
    const auto bytes = static_cast<int64_t>(own.size());
    std::vector<int64_t> sizes(ranks);
    LOSSD_COLLECTIVE_TRY(
        host_.AllGatherV(&bytes, std::vector<int64_t>(ranks, sizeof(bytes)), sizes.data(), nullptr));
    int64_t sum = 0;
    for (const int64_t size : sizes) sum += size;
    std::string joined(static_cast<size_t>(sum), '\0');
    LOSSD_COLLECTIVE_TRY(host_.AllGatherV(own.data(), sizes, joined.data(), nullptr));
    all->clear();
    size_t place = 0;
    for (const int64_t size : sizes) {
      all->push_back(joined.substr(place, static_cast<size_t>(size)));
      place += static_cast<size_t>(size);
    }
    return {};
  }

 private:
  Communicator& host_;
};

std::unique_ptr<Communicator> ConnectGpu(int32_t replica, Communicator& host) {
  HostRendezvous rendezvous(host);
  std::unique_ptr<Communicator> connected;
  const Result result = kernels::collectives::ConnectNccl(
      {.rank = replica, .size = host.size(), .device = replica, .timeout = std::chrono::minutes(2)},
      rendezvous, &connected);
  EXPECT_TRUE(result.ok()) << result.message();
  return connected;
}

}  // namespace

std::vector<DeviceUnderTest> DevicesUnderTest() {
  const auto gradient_error = [](kernels::DataType /*type*/) { return 4e-3; };
  const auto always = [](kernels::DataType /*type*/) { return true; };
  return {{.name = "cuda",
           .create = &Create<CudaPath::kFastest>,
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = always},
          {.name = "cudaPortable",
           .create = &Create<CudaPath::kPortable>,
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = always},
          {.name = kOneEach,
           .create = &Create<CudaPath::kFastest>,
           .gradient_error = gradient_error,
           .bits_depend_on_workspace = always}};
}

int32_t MostReplicas(const DeviceUnderTest& which) {
  return IsOneEach(which) ? CudaDeviceCount() : kMostOnOneGpu;
}

absl::StatusOr<std::unique_ptr<Device>> CreateReplica(const DeviceUnderTest& which, int32_t replica) {
  return IsOneEach(which) ? CreateCuda(replica, kWorkspaceBytes, CudaPath::kFastest)
                          : which.create(kWorkspaceBytes);
}

void RunReplicas(const DeviceUnderTest& which, int32_t replicas, const ReplicaBody& body) {
  DeviceRanks on_one_gpu(replicas);
  std::vector<std::unique_ptr<Communicator>> devices(static_cast<size_t>(replicas));
  std::barrier together(replicas);
  RunOnThreads(replicas, [&](int32_t replica, std::unique_ptr<Communicator>& host) {
    std::unique_ptr<Communicator>& device = devices[static_cast<size_t>(replica)];
    device = IsOneEach(which) ? ConnectGpu(replica, *host) : on_one_gpu.Connect(replica);
    together.arrive_and_wait();
    // Within a host NCCL does not notice who is lost: a server aborts its calls when it hears of it.
    const auto lose = [&] {
      host->Abort();
      for (const std::unique_ptr<Communicator>& one : devices) one->Abort();
    };
    const bool all =
        std::all_of(devices.begin(), devices.end(), [](const auto& one) { return one != nullptr; });
    if (all) body(replica, {{device.get(), host.get()}, lose});
    together.arrive_and_wait();
    device.reset();
  });
}

// A piece has 64 MiB.
int64_t RowsOfSeveralPieces() { return 40000; }

}  // namespace lossd::engine::testing
