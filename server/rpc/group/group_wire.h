// What the ranks of a group say to each other as bytes, by the members that it tells
// (engine/group/group_command_fields.h).
#ifndef LOSSD_SERVER_RPC_GROUP_GROUP_WIRE_H_
#define LOSSD_SERVER_RPC_GROUP_GROUP_WIRE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/group/group_command.h"

namespace lossd::rpc {

// INVALID_ARGUMENT, naming the member, if the bytes are none: of another version, say.
std::string SerializeCommand(const engine::GroupCommand& command);
absl::StatusOr<engine::GroupCommand> ParseCommand(absl::string_view bytes);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_GROUP_WIRE_H_
