// lossctl status
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/src/c_api/status_json.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/head_info.h"
#include "client/tools/lossctl/table.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

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
  if (!status.replicas.name.empty()) json["replicas"] = c_api::ToJson(status.replicas);
  if (status.ranks.empty()) return json;
  json["group_epoch"] = status.group_epoch;
  for (const RankStatus& rank : status.ranks) json["ranks"].push_back(c_api::ToJson(rank));
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

// "2 of 3 (set lm)" for the last one, and how it is with the others.
std::string ReplicaLine(const ReplicaSetStatus& set) {
  if (set.name.empty()) return "";
  const char* const there = set.why_not.empty() ? "all are there" : "all are there, but ";
  return absl::StrCat("  replica      ", set.replica, " of ", set.replicas, " (set ", set.name, "), ",
                      set.whole ? there : "NOT WHOLE: ", set.why_not, "; met ", set.epochs,
                      set.epochs == 1 ? " time" : " times", ", went back ", set.returns,
                      set.returns == 1 ? " time" : " times", "\n");
}

// How long after the first one each has answered lately.
std::string ReplicasTable(const ReplicaSetStatus& set) {
  if (set.members.empty()) return "";
  std::vector<Table::Column> columns = {{"REPLICA", Align::kRight}, {"SESSIONS PLACED", Align::kRight}};
  for (const auto& [phase, seconds] : set.members.front().late_seconds) {
    columns.push_back({absl::StrCat("LATE TO ", absl::AsciiStrToUpper(phase)), Align::kRight});
  }
  Table table(std::move(columns));
  for (const ReplicaSetStatus::Replica& replica : set.members) {
    std::vector<std::string> row = {absl::StrCat(replica.replica),
                                    WithCommas(static_cast<int64_t>(replica.sessions_placed))};
    for (const auto& [phase, seconds] : replica.late_seconds) {
      row.push_back(absl::StrFormat("%.1f ms", 1e3 * seconds));
    }
    table.AddRow(std::move(row));
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
      "  incarnation  ", status.incarnation, "\n", ReplicaLine(status.replicas), "\n", RanksTable(status),
      ReplicasTable(status.replicas), HeadsTable(status.heads));
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
