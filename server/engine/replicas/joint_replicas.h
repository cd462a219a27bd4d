// All replicas of a head in one epoch, as the coordinator reaches them: docs/decisions/0022-replicas.md.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_JOINT_REPLICAS_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_JOINT_REPLICAS_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/replica_communicators.h"
#include "server/engine/head/replica/replica_part.h"
#include "server/engine/replicas/replica_watch.h"

namespace lossd::engine {

// A replica was lost, and with it the epoch: whether it has done what it was asked for is not known.
absl::Status ReplicaLost(absl::string_view why);
bool IsReplicaLost(const absl::Status& status);

// One epoch, at the coordinator: replicas are asked in it, and not after its end. Thread-safe.
class CoordinatedEpoch {
 public:
  // Calls `ask`, which asks all replicas for something, and must not wait. What they exchange blocks their
  // devices: of two heads one has to be first everywhere, so this is for one at a time. False: it is over.
  bool Ask(absl::FunctionRef<void()> ask) ABSL_LOCKS_EXCLUDED(mutex_);
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  Mutex mutex_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
};

struct JointReplicas {
  std::shared_ptr<const ReplicaCommunicators> own;  // the coordinator's
  std::vector<std::shared_ptr<ReplicaPart>> others;
  std::shared_ptr<CoordinatedEpoch> epoch;
  // Told, perhaps several times, when one could not do what others may have done: the epoch is to end. Any
  // thread; it does not wait.
  std::function<void(const absl::Status& why)> on_broken;
  // Told what all are asked for and who has answered. May be null; outlives this.
  ReplicaWatch* watch = nullptr;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_JOINT_REPLICAS_H_
