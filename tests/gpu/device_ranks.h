// Ranks for tests that share one GPU: threads of one process, between which a communicator copies within the
// device's memory. So any number of ranks can be tried where there are not as many GPUs.
#ifndef LOSSD_TESTS_GPU_DEVICE_RANKS_H_
#define LOSSD_TESTS_GPU_DEVICE_RANKS_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/collectives/communicator.h"

namespace lossd::kernels::testing {

// Counted in a process of its own: CUDA does not work in the child of a process that has used it.
int CountDevices();

// What such communicators have in common; it outlives them. One that is aborted, or fails, ends all of them.
class DeviceRanks {
 public:
  explicit DeviceRanks(int32_t ranks);
  ~DeviceRanks();
  DeviceRanks(const DeviceRanks&) = delete;
  DeviceRanks& operator=(const DeviceRanks&) = delete;

  // Any thread's, once a rank.
  std::unique_ptr<collectives::Communicator> Connect(int32_t rank);

 private:
  class Meeting;
  class DeviceCommunicator;

  const int32_t ranks_;
  const std::unique_ptr<Meeting> meeting_;
};

// Runs body on `ranks` threads, each with a communicator, and returns when all have. A rank that waits too
// long for the others gets an error of its communicator's.
using DeviceRankBody = std::function<void(int32_t rank, collectives::Communicator& communicator)>;
void RunOnDevice(int32_t ranks, const DeviceRankBody& body);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_GPU_DEVICE_RANKS_H_
