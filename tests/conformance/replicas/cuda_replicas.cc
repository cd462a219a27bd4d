// Replicas on GPUs: all on one, between whose memories a communicator of the tests copies, so that any number
// of them can be tried anywhere; and on one each, connected by NCCL.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <utility>
#include <vector>

#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "server/engine/device/cuda/cuda_device.h"
#include "tests/conformance/replicas/replicas_under_test.h"
#include "tests/gpu/device_ranks.h"
#include "tests/unit/kernels/thread_ranks.h"

namespace lossd::engine::testing {
namespace {

using kernels::collectives::Communicator;
using kernels::collectives::Rendezvous;
using kernels::testing::DeviceRanks;
using kernels::testing::MeetOnThreads;

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

absl::StatusOr<std::shared_ptr<ReplicaConnection>> Connect(const DeviceUnderTest& which, Device& device,
                                                           const ReplicaPlace& place, Rendezvous& rendezvous,
                                                           DeviceRanks& on_one_gpu) {
  const ReplicaNetwork network{
      .place = place, .timeout = std::chrono::minutes(2), .connect_timeout = std::chrono::minutes(2)};
  if (IsOneEach(which)) return device.ConnectReplicas(network, rendezvous);
  absl::StatusOr<std::unique_ptr<Communicator>> host = ConnectReplicaHosts(network, rendezvous);
  if (!host.ok()) return host.status();
  return OwningConnection(*std::move(host), on_one_gpu.Connect(place.replica));
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

void RunReplicas(const DeviceUnderTest& which, const std::vector<Device*>& devices, const ReplicaBody& body) {
  const auto replicas = static_cast<int32_t>(devices.size());
  DeviceRanks on_one_gpu(replicas);
  std::vector<std::shared_ptr<ReplicaConnection>> connections(devices.size());
  std::barrier together(replicas);
  MeetOnThreads(replicas, [&](int32_t replica, Rendezvous& rendezvous) {
    const auto place = static_cast<size_t>(replica);
    auto connected = Connect(which, *devices[place], {replica, replicas}, rendezvous, on_one_gpu);
    EXPECT_TRUE(connected.ok()) << connected.status();
    if (connected.ok()) connections[place] = *std::move(connected);
    together.arrive_and_wait();
    // Within a host NCCL does not notice who is lost: a server aborts its calls when it hears of it.
    const auto lose = [&] {
      for (const auto& connection : connections) connection->Abort();
    };
    if (std::all_of(connections.begin(), connections.end(), [](const auto& one) { return one != nullptr; })) {
      body(replica, {connections[place]->communicators(), lose});
    }
    together.arrive_and_wait();
    connections[place].reset();
  });
}

// A piece has 64 MiB.
int64_t RowsOfSeveralPieces() { return 40000; }

}  // namespace lossd::engine::testing
