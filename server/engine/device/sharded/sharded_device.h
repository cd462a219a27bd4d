// A group of devices as one: at the leader (rank 0), which alone the engine sees, a Device whose heads have
// their vocabulary spread over all ranks; at the other ranks, what executes the leader's commands.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SHARDED_SHARDED_DEVICE_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SHARDED_SHARDED_DEVICE_H_

#include <memory>

#include "server/engine/device/head_backend.h"
#include "server/engine/device/sharded/shard_head.h"
#include "server/engine/group/rank_channel.h"

namespace lossd::engine {

// `place` is the leader's; its communicators outlive the device. A call that fails because a rank
// is lost is UNAVAILABLE, and the device is then of no more use.
//
// Memory is that of each rank: plans and reports are of the leader's part, and a head that fits there but not
// at another rank is refused with RESOURCE_EXHAUSTED that names the rank.
std::unique_ptr<Device> CreateShardedDevice(std::unique_ptr<Device> local, const RankPlace& place,
                                            std::shared_ptr<RankChannel> channel);

// What one of `ranks` on a host may reserve: all of what the device has, or if that is the host's memory,
// which every rank takes from, its part.
int64_t AvailableMemoryOf(const Device& local, int32_t ranks);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SHARDED_SHARDED_DEVICE_H_
