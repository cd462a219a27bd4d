// At a replica: what the coordinator asks it, done.
#ifndef LOSSD_SERVER_RPC_REPLICAS_PART_COMMANDS_H_
#define LOSSD_SERVER_RPC_REPLICAS_PART_COMMANDS_H_

#include <memory>
#include <string>

#include "server/engine/device/replica_communicators.h"
#include "server/engine/engine.h"
#include "server/rpc/group/group_member.h"

namespace lossd::rpc {

// GroupMember::Take for a ReplicaCommand: begins it, and replies when it is done.
void DoPart(engine::Engine& engine, const std::shared_ptr<const engine::ReplicaCommunicators>& replicas,
            const std::string& command, GroupMember::Reply reply);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_PART_COMMANDS_H_
