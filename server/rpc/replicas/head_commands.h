// At a replica: what the coordinator has it do to heads and their weights.
#ifndef LOSSD_SERVER_RPC_REPLICAS_HEAD_COMMANDS_H_
#define LOSSD_SERVER_RPC_REPLICAS_HEAD_COMMANDS_H_

#include <string>

#include "absl/status/statusor.h"
#include "lossd/group/v1/replica.pb.h"
#include "server/engine/engine.h"

namespace lossd::rpc {

// Whether it is one of those.
bool IsHeadCommand(const group::v1::ReplicaCommand& command);
// Does it, which may take seconds; what the reply says.
absl::StatusOr<std::string> DoHeadCommand(engine::Engine& engine, const group::v1::ReplicaCommand& command);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_HEAD_COMMANDS_H_
