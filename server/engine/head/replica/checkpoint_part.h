// A replica of a head, as the coordinator saves and restores it: docs/decisions/0022-replicas.md.
#ifndef LOSSD_SERVER_ENGINE_HEAD_REPLICA_CHECKPOINT_PART_H_
#define LOSSD_SERVER_ENGINE_HEAD_REPLICA_CHECKPOINT_PART_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/head/parts/head_state.h"
#include "server/engine/head/parts/window_end.h"
#include "server/engine/head/replica/part_rows.h"

namespace lossd::engine {

// What all replicas of a head have in common while nothing ends its window.
struct WindowPlace {
  uint64_t generation = 0;
  uint64_t weight_version = 0;
  int64_t optimizer_steps = 0;
  uint64_t restores = 0;

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
  bool leans = false;      // PartState's
};

// Calls as ReplicaPart's.
class CheckpointPart {
 public:
  using Done = std::function<void(absl::Status)>;

  virtual ~CheckpointPart() = default;

  // Head's, with Part behind their names.
  virtual void Capture(const WindowPlace& place, const std::vector<SessionMarks>& named,
                       std::function<void(absl::StatusOr<HeadCheckpoint>)> done) = 0;
  virtual void SumCaptured(Done done) = 0;
  virtual void Release(Done done) = 0;
  virtual void ReadRows(const PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done) = 0;

  virtual void BeginRestore(std::function<void(absl::StatusOr<RestoringPart>)> done) = 0;
  virtual void WriteRows(const PartRows& rows, std::string bytes, Done done) = 0;
  virtual void FinishRestore(const RestoredPart& part, Done done) = 0;
  virtual void CancelRestore(Done done) = 0;
  // Engine::InstallRestored.
  virtual void InstallRestored(Done done) = 0;
};

// How far a head over replicas is with a checkpoint. Thread-compatible: guarded by Head::mutex_.
struct JointCheckpoint {
  uint64_t epoch = 0;  // of the replicas, counted here: what was asked for in an earlier one comes to nothing

  bool saving = false;                        // at the coordinator
  std::optional<WindowEnd> waiting_end = {};  // of a call that came meanwhile
  bool captured = false;                      // nothing starts on the device until the sum is there
  RestorePhase restoring = RestorePhase::kNone;
  std::optional<RestoredPart> restored = {};  // in kReady
  bool leans = false;                         // PartState's
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_REPLICA_CHECKPOINT_PART_H_
