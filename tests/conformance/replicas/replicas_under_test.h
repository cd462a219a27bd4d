// What the replicas of a head are made of in slices_test.cc. Each program that is made of it says so for its
// devices (DevicesUnderTest).
#ifndef LOSSD_TESTS_CONFORMANCE_REPLICAS_REPLICAS_UNDER_TEST_H_
#define LOSSD_TESTS_CONFORMANCE_REPLICAS_REPLICAS_UNDER_TEST_H_

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/device/head_backend.h"
#include "tests/conformance/device_under_test.h"

namespace lossd::engine::testing {

// Whether more numbers of replicas and ranks are tried than before a commit: LOSSD_MORE_REPLICAS is set.
inline bool TriesMoreReplicas() { return std::getenv("LOSSD_MORE_REPLICAS") != nullptr; }

// How a replica reaches the others, until its body returns.
struct ReplicaConnections {
  ReplicaCommunicators communicators;
  // This replica is lost: calls of the others fail soon, those that are under way too.
  std::function<void()> lose;
};
using ReplicaBody = std::function<void(int32_t replica, const ReplicaConnections& others)>;

// The most replicas that there may be of such devices here.
int32_t MostReplicas(const DeviceUnderTest& which);
// A device of its own for each replica.
absl::StatusOr<std::unique_ptr<Device>> CreateReplica(const DeviceUnderTest& which, int32_t replica);
// Runs body on a thread for each replica, newly connected, and returns when all have. `devices` are those of
// the replicas.
void RunReplicas(const DeviceUnderTest& which, const std::vector<Device*>& devices, const ReplicaBody& body);

// Rows of 2048 columns of which a slice goes in several pieces, where there are two or three replicas.
int64_t RowsOfSeveralPieces();

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_REPLICAS_REPLICAS_UNDER_TEST_H_
