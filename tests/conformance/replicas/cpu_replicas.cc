// Replicas on CPUs, connected by Gloo.
#include <limits>

#include "kernels/collectives/communicator.h"
#include "tests/conformance/replicas/replicas_under_test.h"
#include "tests/unit/kernels/thread_ranks.h"

namespace lossd::engine::testing {

using kernels::collectives::Communicator;
using kernels::testing::RunOnThreads;

int32_t MostReplicas(const DeviceUnderTest& /*which*/) { return std::numeric_limits<int32_t>::max(); }

absl::StatusOr<std::unique_ptr<Device>> CreateReplica(const DeviceUnderTest& which, int32_t /*replica*/) {
  return which.create(kWorkspaceBytes);
}

void RunReplicas(const DeviceUnderTest& /*which*/, const std::vector<Device*>& devices,
                 const ReplicaBody& body) {
  RunOnThreads(static_cast<int32_t>(devices.size()),
               [&](int32_t replica, std::unique_ptr<Communicator>& communicator) {
                 body(replica, {.communicators = {communicator.get(), communicator.get()},
                                .lose = [&communicator] { communicator->Abort(); }});
               });
}

int64_t RowsOfSeveralPieces() { return 4200; }

}  // namespace lossd::engine::testing
