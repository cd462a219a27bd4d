// The coordinator's side of the end of a window: docs/decisions/0022-replicas.md. The protocol is
// tests/model/replicas.pml, where this is Coordinator.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_WINDOW_ENDING_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_WINDOW_ENDING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/common/mutex.h"
#include "server/engine/head/head.h"
#include "server/engine/head/replica/replica_part.h"
#include "server/engine/replicas/replica_watch.h"

namespace lossd::engine {

// A replica was lost, and with it the epoch: whether it has done what it was asked for is not known.
absl::Status ReplicaLost(absl::string_view why);
bool IsReplicaLost(const absl::Status& status);

// What a coordinator does in one epoch, and nothing when that is over. Thread-safe.
class CoordinatedEpoch {
 public:
  // Calls `ask`, which asks all replicas for something, and must not wait. What they exchange blocks their
  // devices: of two heads one has to be first everywhere, so this is for one at a time. False: it is over.
  bool Ask(absl::FunctionRef<void()> ask) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `finish`, which ends something at the coordinator.
  bool Finish(absl::FunctionRef<void()> finish) ABSL_LOCKS_EXCLUDED(mutex_);
  // It is over when this returns.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  Mutex mutex_;
  CondVar finished_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  int finishing_ ABSL_GUARDED_BY(mutex_) = 0;
};

struct EndingReplicas {
  std::shared_ptr<const ReplicaCommunicators> own;  // the coordinator's
  std::vector<std::shared_ptr<ReplicaPart>> others;
  std::shared_ptr<CoordinatedEpoch> epoch;
  // Told, perhaps several times, when one could not do what others may have done: the epoch is to end, so
  // that they settle it. Any thread; it does not wait.
  std::function<void(const absl::Status& why)> on_broken;
  // Told what all are asked for and who has answered. May be null; outlives the endings.
  ReplicaWatch* watch = nullptr;
};

// Ends the window of `head`, the coordinator's, and of its replicas: seal, sum, and by what `end` says step,
// hold the flush, or open again after a look, each when all have done the one before; or with a fate commits
// or aborts the flush that holds it. Who waits at `head` is answered when all have done the last one; with
// UNAVAILABLE if a replica is lost before, and then the next epoch decides what becomes of it
// (SettleReplicas).
void EndWindow(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas);
// The same where all replicas have the sums.
void GoOnEndingWindow(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_WINDOW_ENDING_H_
