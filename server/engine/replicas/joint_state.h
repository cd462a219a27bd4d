// A checkpoint knows nothing of replicas: how one comes of what all of them are, and goes back to as many as
// there are then.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_JOINT_STATE_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_JOINT_STATE_H_

#include <span>
#include <vector>

#include "server/engine/head/parts/head_state.h"
#include "server/engine/head/replica/checkpoint_part.h"

namespace lossd::engine {

// parts[i] is what replica i was, at one place of all of them; at least one. Its gradient is that of the
// window if one of them has any: their sum.
HeadCheckpoint MergeParts(std::vector<HeadCheckpoint> parts);

// What a replica was when its window began: sessions are where they were then, and nothing is in the window.
void GoBackToWindowBegin(HeadCheckpoint* part);

// What each of these replicas becomes. Sessions go where their ids say (ReplicaOf), the gradient and its
// tokens to the coordinator.
std::vector<RestoredPart> SplitCheckpoint(const HeadCheckpoint& state, const RestoreNumbers& numbers,
                                          std::span<const RestoringPart> replicas);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_JOINT_STATE_H_
