// Commands of a group's leader as bytes.
#ifndef LOSSD_SERVER_RPC_GROUP_COMMAND_WIRE_H_
#define LOSSD_SERVER_RPC_GROUP_COMMAND_WIRE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/group/group_command.h"

namespace lossd::rpc {

std::string SerializeCommand(const engine::GroupCommand& command);
// INVALID_ARGUMENT if the bytes are no command: of a leader of another version, say.
absl::StatusOr<engine::GroupCommand> ParseCommand(absl::string_view bytes);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_COMMAND_WIRE_H_
