// lossctl status
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/head_info.h"
#include "client/tools/lossctl/table.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

nlohmann::ordered_json ToJson(const RankStatus& rank) {
  return {{"rank", rank.rank},
          {"device", rank.device},
          {"device_description", rank.device_description},
          {"pci_bus_id", rank.pci_bus_id},
          {"host", rank.host},
          {"memory_limit_bytes", rank.memory_limit_bytes},
          {"memory_reserved_bytes", rank.memory_reserved_bytes},
          {"uptime_seconds", rank.uptime_seconds},
          {"waited_seconds", rank.waited_seconds},
          {"command", rank.command},
          {"command_seconds", rank.command_seconds},
          {"waits_at", rank.waits_at},
          {"stuck", rank.stuck}};
}

nlohmann::ordered_json ToJson(const std::string& server, const ServerStatus& status) {
  nlohmann::ordered_json heads = nlohmann::ordered_json::array();
  for (const HeadInfo& head : status.heads) heads.push_back(HeadToJson(head));
  nlohmann::ordered_json json = {{"server", server},
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
  if (status.ranks.empty()) return json;
  json["group_epoch"] = status.group_epoch;
  for (const RankStatus& rank : status.ranks) json["ranks"].push_back(ToJson(rank));
  return json;
}

// Share of its time that a rank waited for the others.
std::string WaitedText(const RankStatus& rank) {
  const double share = rank.uptime_seconds > 0 ? rank.waited_seconds / rank.uptime_seconds : 0;
  return absl::StrFormat("%s (%.1f %%)", FormatSeconds(rank.waited_seconds), 100 * share);
}

std::string CommandText(const RankStatus& rank) {
  if (rank.command.empty()) return "-";
  return absl::StrCat(rank.command, " for ", FormatSeconds(rank.command_seconds),
                      rank.waits_at.empty() ? "" : absl::StrCat(", waits at ", rank.waits_at),
                      rank.stuck ? ": stuck" : "");
}

std::string RanksTable(const ServerStatus& status) {
  if (status.ranks.empty()) return "";
  Table table({{"RANK", Align::kRight},
               {"HOST"},
               {"DEVICE"},
               {"RESERVED", Align::kRight},
               {"LIMIT", Align::kRight},
               {"WAITED", Align::kRight},
               {"COMMAND"}});
  for (const RankStatus& rank : status.ranks) {
    table.AddRow({absl::StrCat(rank.rank), rank.host.empty() ? "-" : rank.host, rank.device,
                  FormatBytes(rank.memory_reserved_bytes), FormatBytes(rank.memory_limit_bytes),
                  WaitedText(rank), CommandText(rank)});
  }
  return absl::StrCat(table.Render(), "\n");
}

std::string ToText(const std::string& server, const ServerStatus& status) {
  return absl::StrCat(
      "lossd ", status.version, " at ", server, ": ", status.draining ? "draining" : "serving", ", up ",
      FormatSeconds(status.uptime_seconds), "\n",                                                 //
      "  device       ", status.device, " (", status.device_description, ")\n",                   //
      "  applied      ", WithCommas(static_cast<int64_t>(status.tokens_applied)), " tokens in ",  //
      WithCommas(static_cast<int64_t>(status.chunks_applied)), " chunks\n",                       //
      "  queued       ", WithCommas(status.queued_chunks), " chunks\n",                           //
      "  incarnation  ", status.incarnation, "\n\n", RanksTable(status), HeadsTable(status.heads));
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
