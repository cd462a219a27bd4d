// States of one replica of a head: when all of them meet, are saved or are restored.
#ifndef LOSSD_SERVER_ENGINE_HEAD_REPLICA_CHECKPOINT_PART_H_
#define LOSSD_SERVER_ENGINE_HEAD_REPLICA_CHECKPOINT_PART_H_

#include <cstdint>
#include <optional>
#include <string>

#include "server/engine/head/parts/head_state.h"
#include "server/engine/head/parts/window_end.h"

namespace lossd::engine {

// What all replicas of a head have in common while nothing ends its window.
struct WindowPlace {
  uint64_t generation = 0;
  uint64_t weight_version = 0;
  int64_t optimizer_steps = 0;
  uint64_t restores = 0;
  std::string flush_id = {};  // of the flush that holds the window; empty: none does

  bool operator==(const WindowPlace&) const = default;
};

// What a replica tells when a restore begins.
struct RestoringPart {
  std::string incarnation;  // of its server
  uint64_t weight_version = 0;
};

// What a replica becomes when all of them have what the checkpoint says.
struct RestoredPart {
  HeadCheckpoint state;    // with the sessions, tokens and gradients that lie here
  RestoreNumbers numbers;  // the same everywhere
};

// The state of a replica of a head when all of them meet.
struct MetPart {
  WindowPlace place;
  bool broken = false;  // a step or a restore that has begun is not over: nothing but a checkpoint mends it

  bool operator==(const MetPart&) const = default;
};

// How far a head over replicas is with a checkpoint. Thread-compatible: guarded by Head::mutex_.
struct JointCheckpoint {
  uint64_t epoch = 0;  // of the replicas, counted here: what was asked for in an earlier one comes to nothing

  bool saving = false;                        // at the coordinator
  std::optional<WindowEnd> waiting_end = {};  // of a call that came meanwhile
  bool captured = false;                      // nothing starts on the device until the sum is there
  RestorePhase restoring = RestorePhase::kNone;
  std::optional<RestoredPart> restored = {};  // in kReady
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_REPLICA_CHECKPOINT_PART_H_
