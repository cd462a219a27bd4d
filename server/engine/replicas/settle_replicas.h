// What becomes of a window that an epoch of replicas left behind half ended: docs/decisions/0022-replicas.md.
// The protocol is tests/model/replicas.pml, where this is decide() and fence().
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_SETTLE_REPLICAS_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_SETTLE_REPLICAS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/head/parts/window.h"

namespace lossd::engine {

// What one replica has kept of a head. It says so when it joins an epoch.
struct ReplicaState {
  // Weights, optimizer's state and windows. Without them it has come back empty, and the rest says nothing.
  bool holds = false;
  uint64_t history = 0;     // that of the set when it was last in an epoch
  uint64_t generation = 0;  // of the window
  EndingPhase phase = EndingPhase::kOpen;
  std::string flush_id;  // of the flush that ends the window; empty: a step does, or nothing
  // Replicas whose sessions, of this very window, were taken here while they were away.
  std::vector<int32_t> took_sessions_of = {};
};

enum class Verdict {
  kDrop,     // windows are open again, what was summed is dropped
  kGoOn,     // those that have not stepped do so; a flush stays sealed with its sums
  kCommit,   // those that have not committed the flush do so
  kRestore,  // a slice is lost: all go back to the newest checkpoint
};

struct Settlement {
  Verdict verdict = Verdict::kDrop;
  uint64_t generation = 0;  // that all have when it is done; 0 with kRestore
  std::string flush_id;     // of the flush that stays sealed, or is committed
  // By replica: whether it is filled by its neighbours, and whether its window is dropped, with its sessions,
  // because some of them count elsewhere.
  std::vector<bool> refilled;
  std::vector<bool> fenced;
};

// Decides from what all replicas say, states[i] being of replica i. FAILED_PRECONDITION if two of them cannot
// be of one head, INTERNAL if they contradict what the protocol lets happen: nothing is done then.
absl::StatusOr<Settlement> SettleReplicas(std::span<const ReplicaState> states);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_SETTLE_REPLICAS_H_
