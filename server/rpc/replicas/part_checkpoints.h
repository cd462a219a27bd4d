// At a replica: its part in a checkpoint of all of them, as the coordinator asks for it.
#ifndef LOSSD_SERVER_RPC_REPLICAS_PART_CHECKPOINTS_H_
#define LOSSD_SERVER_RPC_REPLICAS_PART_CHECKPOINTS_H_

#include <memory>

#include "lossd/group/v1/checkpoint.pb.h"
#include "server/engine/device/replica_communicators.h"
#include "server/engine/engine.h"
#include "server/rpc/group/group_member.h"

namespace lossd::rpc {

// Whether all replicas exchange something in it, or have to come to its end alike.
bool IsExchange(const group::v1::CheckpointCommand& part);

// Begins it, and replies when it is done.
void DoCheckpointPart(engine::Engine& engine, const std::shared_ptr<engine::Head>& head,
                      const std::shared_ptr<const engine::ReplicaCommunicators>& replicas,
                      const group::v1::CheckpointCommand& part, GroupMember::Reply reply);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_PART_CHECKPOINTS_H_
