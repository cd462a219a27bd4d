#include "server/rpc/group/group_wire.h"

#include "server/engine/group/group_command_fields.h"
#include "server/rpc/fields/fields.h"

namespace lossd::rpc {

std::string SerializeCommand(const engine::GroupCommand& command) { return ToBytes(command); }

absl::StatusOr<engine::GroupCommand> ParseCommand(absl::string_view bytes) {
  engine::GroupCommand command;
  if (absl::Status read = FromBytes(bytes, "command", &command); !read.ok()) return read;
  return command;
}

}  // namespace lossd::rpc
