// The process of a rank that is not the leader.
#ifndef LOSSD_SERVER_STARTUP_GROUP_RUN_RANK_H_
#define LOSSD_SERVER_STARTUP_GROUP_RUN_RANK_H_

#include <cstdint>

#include "server/engine/device/device_kind.h"
#include "server/startup/group/group_options.h"
#include "server/startup/group/node_front.h"
#include "server/startup/group/parent_link.h"
#include "server/startup/group/rank_lanes.h"

namespace lossd {

// Does what the leader says until it has ended the group; returns the exit status, 0 then. Clients may open
// lanes here, as `lanes` says; it keeps no checkpoints. The first rank of another node than the leader's
// serves health as `front` says. `memory_limit_bytes` is this rank's own; 0: what its device has for it. When
// the leader is lost, or another rank in the middle of something, the process ends here (EndRank).
int RunRank(const GroupOptions& group, const engine::DeviceOptions& device, int64_t memory_limit_bytes,
            const RankLaneOptions& lanes, const NodeFrontOptions& front, ParentLink* parent);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_RUN_RANK_H_
