// The coordinator's side of checkpoints of a head that is over replicas: docs/decisions/0022-replicas.md.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_JOINT_CHECKPOINT_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_JOINT_CHECKPOINT_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/head/head.h"
#include "server/engine/head/parts/head_state.h"
#include "server/engine/replicas/joint_replicas.h"

namespace lossd::engine {

// Both wait, and are called by a thread that nobody else waits for. ReplicaLost if a replica is lost.

// Writes every file but the manifest, which is to say what this returns: of one moment at each replica, while
// nothing ends the window. Chunks are taken meanwhile. Refused as Head::BeginSave, and as Head::Save where
// the window is not as `named`; nothing has changed then, or after any other error.
// With kAsItBegan the window is that of its begin: chunks that have come since are not in it. The sum of all
// windows cannot say what deterministic sessions have added to it, whose order counts: with kAsItIs such a
// window is refused (FAILED_PRECONDITION), with kWhereItCan it is saved as it began, and clients send it
// again.
enum class SavedWindow { kAsItIs, kAsItBegan, kWhereItCan };
absl::StatusOr<HeadCheckpoint> SaveTogether(const std::shared_ptr<Head>& head, const JointReplicas& replicas,
                                            const std::vector<SessionMarks>& named, SavedWindow window,
                                            StateSink* sink);

// Puts all replicas back to what `source` has, or none: but for an error after some rows were written, from
// which the head is no use until it is restored again. `numbers.restores` as Head::Restore's; of the weights
// the version is at least that of `numbers`. Answers the keys of the restored tensors.
absl::StatusOr<FileKeys> RestoreTogether(const std::shared_ptr<Head>& head, const JointReplicas& replicas,
                                         RestoreNumbers numbers,
                                         const std::shared_ptr<const StateSource>& source);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_JOINT_CHECKPOINT_H_
