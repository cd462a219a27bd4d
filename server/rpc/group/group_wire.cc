#include "server/rpc/group/group_wire.h"

#include "server/engine/device/device_report_fields.h"
#include "server/engine/group/group_command_fields.h"
#include "server/rpc/fields/fields.h"

namespace lossd::rpc {
namespace {

template <class Value>
absl::StatusOr<Value> Parsed(absl::string_view bytes, const char* what) {
  Value value;
  if (absl::Status read = FromBytes(bytes, what, &value); !read.ok()) return read;
  return value;
}

}  // namespace

std::string SerializeCommand(const engine::GroupCommand& command) { return ToBytes(command); }
absl::StatusOr<engine::GroupCommand> ParseCommand(absl::string_view bytes) {
  return Parsed<engine::GroupCommand>(bytes, "command");
}

std::string SerializeAnswer(const engine::AnsweredChunk& answer) { return ToBytes(answer); }
absl::StatusOr<engine::AnsweredChunk> ParseAnswer(absl::string_view bytes) {
  return Parsed<engine::AnsweredChunk>(bytes, "answer");
}

std::string SerializeReport(const engine::RankReport& report) { return ToBytes(report); }
absl::StatusOr<engine::RankReport> ParseReport(absl::string_view bytes) {
  return Parsed<engine::RankReport>(bytes, "report");
}

}  // namespace lossd::rpc
