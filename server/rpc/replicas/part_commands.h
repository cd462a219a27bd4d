// At a replica: what the coordinator asks it, done.
#ifndef LOSSD_SERVER_RPC_REPLICAS_PART_COMMANDS_H_
#define LOSSD_SERVER_RPC_REPLICAS_PART_COMMANDS_H_

#include <functional>
#include <memory>
#include <string>

#include "lossd/group/v1/replica.pb.h"
#include "server/engine/device/replica_communicators.h"
#include "server/engine/engine.h"
#include "server/rpc/group/group_member.h"

namespace lossd::rpc {

// GroupMember::Take for a ReplicaCommand: begins it, and replies when it is done. `lose` is told, before the
// coordinator is, why this replica has not taken part in something that all exchange: what it exchanges next
// would meet what the others still wait for.
void DoPart(engine::Engine& engine, const std::shared_ptr<const engine::ReplicaCommunicators>& replicas,
            const group::v1::ReplicaCommand& command, GroupMember::Reply reply,
            std::function<void(const absl::Status& why)> lose);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_PART_COMMANDS_H_
