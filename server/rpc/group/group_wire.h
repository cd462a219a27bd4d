// What the ranks of a group say to each other as bytes, by the members that structs tell
// (engine/group/group_command_fields.h, engine/device/device_report_fields.h).
#ifndef LOSSD_SERVER_RPC_GROUP_GROUP_WIRE_H_
#define LOSSD_SERVER_RPC_GROUP_GROUP_WIRE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/device/device_report.h"
#include "server/engine/group/answered_chunk.h"
#include "server/engine/group/group_command.h"

namespace lossd::rpc {

// Bytes that are no such thing, of another version, say, are INVALID_ARGUMENT, which names the member.

std::string SerializeCommand(const engine::GroupCommand& command);
absl::StatusOr<engine::GroupCommand> ParseCommand(absl::string_view bytes);

std::string SerializeAnswer(const engine::AnsweredChunk& answer);
// Whether it makes sense shows where its batch is known: engine::AwaitedAnswers.
absl::StatusOr<engine::AnsweredChunk> ParseAnswer(absl::string_view bytes);

std::string SerializeReport(const engine::RankReport& report);
absl::StatusOr<engine::RankReport> ParseReport(absl::string_view bytes);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_GROUP_WIRE_H_
