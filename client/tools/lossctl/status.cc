// lossctl status
#include "absl/strings/str_cat.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/head_info.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

nlohmann::ordered_json ToJson(const std::string& server, const ServerStatus& status) {
  nlohmann::ordered_json heads = nlohmann::ordered_json::array();
  for (const HeadInfo& head : status.heads) heads.push_back(HeadToJson(head));
  return {{"server", server},
          {"version", status.version},
          {"incarnation", status.incarnation},
          {"state", status.draining ? "draining" : "serving"},
          {"device", status.device},
          {"device_description", status.device_description},
          {"uptime_seconds", status.uptime_seconds},
          {"chunks_applied", status.chunks_applied},
          {"tokens_applied", status.tokens_applied},
          {"queued_chunks", status.queued_chunks},
          {"heads", heads},
          {"features", status.features}};
}

std::string ToText(const std::string& server, const ServerStatus& status) {
  return absl::StrCat(
      "lossd ", status.version, " at ", server, ": ", status.draining ? "draining" : "serving", ", up ",
      FormatSeconds(status.uptime_seconds), "\n",                                                 //
      "  device       ", status.device, " (", status.device_description, ")\n",                   //
      "  applied      ", WithCommas(static_cast<int64_t>(status.tokens_applied)), " tokens in ",  //
      WithCommas(static_cast<int64_t>(status.chunks_applied)), " chunks\n",                       //
      "  queued       ", WithCommas(status.queued_chunks), " chunks\n",                           //
      "  incarnation  ", status.incarnation, "\n\n", HeadsTable(status.heads));
}

absl::Status RunStatus(const Context& context) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto status = (*client)->Status();
  if (!status.ok()) return status.status();
  context.Print(ToJson(context.server, *status), ToText(context.server, *status));
  return absl::OkStatus();
}

}  // namespace

void AddStatusCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("status", "Show the server and its heads");
  AddCommonOptions(*command, context);
  command->footer(
      "Examples:\n"
      "  lossctl status\n"
      "  lossctl status --server trainer-7:50051 --json | jq .heads[].name\n");
  command->callback([&context] { context.run = [&context] { return RunStatus(context); }; });
}

}  // namespace lossd::tools
