// A group for tests whose ranks are threads of one process: everything of a sharded device but processes.
#ifndef LOSSD_TESTS_CONFORMANCE_RANK_THREADS_H_
#define LOSSD_TESTS_CONFORMANCE_RANK_THREADS_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/group/rank_channel.h"
#include "server/engine/group/rank_payloads.h"

namespace lossd::engine::testing {

struct RankThreadOptions {
  int32_t ranks = 2;
  int64_t workspace_bytes = 0;  // of each rank
  // A rank's own device; null: the CPU.
  std::function<absl::StatusOr<std::unique_ptr<Device>>(int32_t rank)> create = nullptr;
  // What moves the memory of these devices, called by a rank's own thread; null: what moves the host's.
  std::function<kernels::collectives::Result(int32_t rank, kernels::collectives::Rendezvous& rendezvous,
                                             std::unique_ptr<kernels::collectives::Communicator>*)>
      connect = nullptr;
  // What a rank may reserve; null: more than any test wants. Not the leader's, whom nobody limits.
  std::function<int64_t(int32_t rank)> memory_limit = nullptr;
  // Which rank holds a batch, counted from 0: hidden states are moved there before it starts, and dX back
  // from there. Null: rank 0 holds all.
  std::function<int32_t(uint64_t batch)> holder = nullptr;
};

// The leader's device; ranks are connected by Gloo, and commands go by the wire's bytes. The other ranks end
// with it. What goes wrong at one of them fails the test, and the program, as nothing else would end the
// leader's wait.
absl::StatusOr<std::unique_ptr<Device>> CreateRankThreads(const RankThreadOptions& options);

// The same with what tests need that put chunks at ranks themselves. `holder` is none of the options then.
struct RankThreadGroup {
  std::unique_ptr<Device> leader;
  std::shared_ptr<RankChannel> channel;
  std::function<RankPayloads&(int32_t rank)> payloads;  // of a rank that is not the leader
};
absl::StatusOr<RankThreadGroup> CreateRankThreadGroup(const RankThreadOptions& options);

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_RANK_THREADS_H_
