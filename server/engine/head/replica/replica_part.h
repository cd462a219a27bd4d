// A replica of a head, as the coordinator reaches it: docs/decisions/0022-replicas.md.
#ifndef LOSSD_SERVER_ENGINE_HEAD_REPLICA_REPLICA_PART_H_
#define LOSSD_SERVER_ENGINE_HEAD_REPLICA_REPLICA_PART_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/window_end.h"
#include "server/engine/head/replica/checkpoint_part.h"
#include "server/engine/head/replica/part_rows.h"

namespace lossd::engine {

// Calls never block, and what is asked of one replica comes there in the order of the calls. The answer is
// called once, by any thread; with ReplicaLost if the epoch was over before. Thread-safe. What each of them
// does is said at Head's method of the same name, behind which Part stands there.
class ReplicaPart {
 public:
  using Done = std::function<void(absl::Status)>;

  virtual ~ReplicaPart() = default;

  // The end of a window
  virtual void Seal(const WindowEnd& end, std::function<void(absl::StatusOr<SealedWindow>)> done) = 0;
  virtual void Sum(const JointSum& sum, std::function<void(absl::StatusOr<GradientStats>)> done) = 0;
  // PublishPart once StepPart is done.
  virtual void Step(const JointStep& step, Done done) = 0;
  virtual void Reopen(const absl::Status& why, Done done) = 0;
  virtual void Hold(const FlushInfo& flush, Done done) = 0;
  virtual void EndFlush(const std::string& flush_id, FlushFate fate, Done done) = 0;

  // Rows, at any time
  virtual void ReadRows(const PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done) = 0;
  virtual void WriteRows(const PartRows& rows, std::string bytes, Done done) = 0;

  // Checkpoints
  virtual void Capture(const WindowPlace& place, const std::vector<SessionMarks>& named,
                       std::function<void(absl::StatusOr<HeadCheckpoint>)> done) = 0;
  virtual void SumCaptured(Done done) = 0;
  virtual void Release(Done done) = 0;
  virtual void BeginRestore(std::function<void(absl::StatusOr<RestoringPart>)> done) = 0;
  virtual void FinishRestore(const RestoredPart& part, Done done) = 0;
  virtual void CancelRestore(Done done) = 0;
  // Engine::InstallRestored.
  virtual void InstallRestored(Done done) = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_REPLICA_REPLICA_PART_H_
