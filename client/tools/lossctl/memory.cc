// lossctl memory
#include <algorithm>

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

nlohmann::ordered_json ToJson(const ServerMemory& memory) {
  nlohmann::ordered_json heads = nlohmann::ordered_json::object();
  for (const ServerMemory::Head& head : memory.heads) heads[head.name] = MemoryToJson(head.items);
  return {{"limit_bytes", memory.limit_bytes},
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
          {"heads", heads},
          {"shared", MemoryToJson(memory.shared)}};
}

// Bars are drawn against the largest item, so that the table shows what is big.
std::string ItemsTable(const ServerMemory& memory) {
  int64_t largest = 0;
  const auto grow = [&largest](const std::vector<MemoryItem>& items) {
    for (const MemoryItem& item : items) largest = std::max(largest, item.bytes);
  };
  for (const ServerMemory::Head& head : memory.heads) grow(head.items);
  grow(memory.shared);

  Table table({{"HEAD"}, {"PURPOSE"}, {"SIZE", Align::kRight}, {""}});
  const bool unicode = UnicodeAllowed();
  const auto add = [&](const std::string& owner, const std::vector<MemoryItem>& items) {
    bool first = true;
    for (const MemoryItem& item : items) {
      table.AddRow({first ? owner : "", item.purpose, FormatBytes(item.bytes),
                    DrawBar(Fraction(item.bytes, largest), kItemBarWidth, unicode)});
      first = false;
    }
  };
  for (const ServerMemory::Head& head : memory.heads) add(head.name, head.items);
  add("(shared)", memory.shared);
  return table.Render();
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
                      ItemsTable(memory));
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
      "which comes on top, is what sessions and streams of rows may have under way.\n\n"
      "Examples:\n"
      "  lossctl memory\n"
      "  lossctl memory --json | jq '.limit_bytes - .reserved_bytes'   # free for new heads\n");
  command->callback([&context] { context.run = [&context] { return RunMemory(context); }; });
}

}  // namespace lossd::tools
