// lossctl memory
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/head_info.h"
#include "client/tools/lossctl/table.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

constexpr int kSummaryBarWidth = 32;
constexpr int kItemBarWidth = 16;

double Fraction(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

nlohmann::ordered_json ToJson(const std::vector<ServerMemory::Head>& heads) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const ServerMemory::Head& head : heads) json[head.name] = MemoryToJson(head.items);
  return json;
}

nlohmann::ordered_json ToJson(const ServerMemory::Rank& rank) {
  return {{"rank", rank.rank},
          {"limit_bytes", rank.limit_bytes},
          {"reserved_bytes", rank.reserved_bytes},
          {"device_total_bytes", rank.device_total_bytes},
          {"device_free_bytes", rank.device_free_bytes},
          {"process_resident_bytes", rank.process_resident_bytes},
          {"process_peak_bytes", rank.process_peak_bytes},
          {"heads", ToJson(rank.heads)},
          {"shared", MemoryToJson(rank.shared)}};
}

nlohmann::ordered_json ToJson(const ServerMemory& memory) {
  nlohmann::ordered_json json = {{"limit_bytes", memory.limit_bytes},
                                 {"reserved_bytes", memory.reserved_bytes},
                                 {"head_quota_bytes", memory.head_quota_bytes},
                                 {"device_total_bytes", memory.device_total_bytes},
                                 {"device_free_bytes", memory.device_free_bytes},
                                 {"staging_limit_bytes", memory.staging_limit_bytes},
                                 {"staging_reserved_bytes", memory.staging_reserved_bytes},
                                 {"row_streams", memory.row_streams},
                                 {"row_stream_bytes", memory.row_stream_bytes},
                                 {"process_resident_bytes", memory.process_resident_bytes},
                                 {"process_peak_bytes", memory.process_peak_bytes},
                                 {"heads", ToJson(memory.heads)},
                                 {"shared", MemoryToJson(memory.shared)}};
  for (const ServerMemory::Rank& rank : memory.ranks) json["ranks"].push_back(ToJson(rank));
  return json;
}

// Bars are drawn against the largest item, so that the table shows what is big. In a group every line begins
// with its rank.
class ItemsTable {
 public:
  explicit ItemsTable(const ServerMemory& memory)
      : ranks_(!memory.ranks.empty()),
        table_(ranks_ ? std::vector<Table::Column>{{"RANK", Align::kRight},
                                                   {"HEAD"},
                                                   {"PURPOSE"},
                                                   {"SIZE", Align::kRight},
                                                   {""}}
                      : std::vector<Table::Column>{{"HEAD"}, {"PURPOSE"}, {"SIZE", Align::kRight}, {""}}) {
    Measure(memory);
    for (const ServerMemory::Rank& rank : memory.ranks) Measure(rank);
    if (!ranks_) Add("", memory);
    for (const ServerMemory::Rank& rank : memory.ranks) Add(absl::StrCat(rank.rank), rank);
  }

  std::string Render() const { return table_.Render(); }

 private:
  // `Owner` is a server, or a rank.
  template <class Owner>
  void Measure(const Owner& owner) {
    const auto grow = [this](const std::vector<MemoryItem>& items) {
      for (const MemoryItem& item : items) largest_ = std::max(largest_, item.bytes);
    };
    for (const ServerMemory::Head& head : owner.heads) grow(head.items);
    grow(owner.shared);
  }
  template <class Owner>
  void Add(const std::string& rank, const Owner& owner) {
    for (const ServerMemory::Head& head : owner.heads) AddItems(rank, head.name, head.items);
    AddItems(rank, "(shared)", owner.shared);
  }
  void AddItems(const std::string& rank, const std::string& owner, const std::vector<MemoryItem>& items) {
    bool first = true;
    for (const MemoryItem& item : items) {
      std::vector<std::string> cells = {
          first ? owner : "", item.purpose, FormatBytes(item.bytes),
          DrawBar(Fraction(item.bytes, largest_), kItemBarWidth, UnicodeAllowed())};
      if (ranks_) cells.insert(cells.begin(), rank);
      table_.AddRow(std::move(cells));
      first = false;
    }
  }

  const bool ranks_;
  int64_t largest_ = 0;
  Table table_;
};

std::string RanksTable(const ServerMemory& memory) {
  if (memory.ranks.empty()) return "";
  Table table({{"RANK", Align::kRight},
               {"RESERVED", Align::kRight},
               {"LIMIT", Align::kRight},
               {""},
               {"DEVICE", Align::kRight},
               {"OF", Align::kRight},
               {"PROCESS", Align::kRight},
               {"PEAK", Align::kRight}});
  for (const ServerMemory::Rank& rank : memory.ranks) {
    table.AddRow({absl::StrCat(rank.rank), FormatBytes(rank.reserved_bytes), FormatBytes(rank.limit_bytes),
                  DrawBar(Fraction(rank.reserved_bytes, rank.limit_bytes), kItemBarWidth, UnicodeAllowed()),
                  FormatBytes(rank.device_total_bytes - rank.device_free_bytes),
                  FormatBytes(rank.device_total_bytes), FormatBytes(rank.process_resident_bytes),
                  FormatBytes(rank.process_peak_bytes)});
  }
  return absl::StrCat(table.Render(), "\n");
}

// A bar of what is taken, and the numbers behind it.
std::string SummaryLine(absl::string_view label, int64_t used, int64_t total) {
  const double fraction = Fraction(used, total);
  return absl::StrCat(label, DrawBar(fraction, kSummaryBarWidth, UnicodeAllowed()), "  ", FormatBytes(used),
                      " of ", FormatBytes(total), " (", static_cast<int>(fraction * 100), " %)\n");
}

std::string ToText(const ServerMemory& memory) {
  std::string text = SummaryLine("reserved  ", memory.reserved_bytes, memory.limit_bytes);
  if (memory.device_total_bytes > 0) {
    absl::StrAppend(&text, SummaryLine("device    ", memory.device_total_bytes - memory.device_free_bytes,
                                       memory.device_total_bytes));
  }
  if (memory.head_quota_bytes > 0) {
    absl::StrAppend(&text, "quota     ", FormatBytes(memory.head_quota_bytes), " a head\n");
  }
  if (memory.staging_limit_bytes > 0) {
    const int64_t taken = memory.staging_reserved_bytes + memory.row_stream_bytes;
    absl::StrAppend(&text, SummaryLine("staging   ", taken, memory.staging_limit_bytes),
                    "          sessions ", FormatBytes(memory.staging_reserved_bytes), ", streams of rows ",
                    FormatBytes(memory.row_stream_bytes), " (", memory.row_streams, ")\n");
  }
  return absl::StrCat(text, "process   ", FormatBytes(memory.process_resident_bytes), " resident, ",
                      FormatBytes(memory.process_peak_bytes), " at most since the start\n\n",
                      RanksTable(memory), ItemsTable(memory).Render());
}

absl::Status RunMemory(const Context& context) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto memory = (*client)->Memory();
  if (!memory.ok()) return memory.status();
  context.Print(ToJson(*memory), ToText(*memory));
  return absl::OkStatus();
}

}  // namespace

void AddMemoryCommand(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("memory", "Show what memory is reserved, by head and by purpose");
  AddCommonOptions(*command, context);
  command->footer(
      "What is reserved is the sum of the table. The device's line counts everybody who uses it. Staging, "
      "which comes on top, is what sessions and streams of rows may have under way. Of a server over several "
      "devices every rank is shown; the lines before the tables are the leader's.\n\n"
      "Examples:\n"
      "  lossctl memory\n"
      "  lossctl memory --json | jq '.limit_bytes - .reserved_bytes'   # free for new heads\n");
  command->callback([&context] { context.run = [&context] { return RunMemory(context); }; });
}

}  // namespace lossd::tools
