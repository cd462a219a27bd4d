#include "server/telemetry/status_page/status_page.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "server/engine/common/random_id.h"
#include "server/telemetry/common/age.h"
#include "server/telemetry/status_page/html.h"

namespace lossd::telemetry {
namespace {

constexpr size_t kMostSessions = 50;  // of the table
constexpr double kBarUnits = 1000;    // width of a bar in its own units

struct Part {
  std::string name;
  double bytes = 0;
  int color = 0;  // class p0, p1, ...
};

struct Column {
  const char* name;
  const char* of_cell = "";  // its class
};

std::string AgeText(absl::Time now, const std::optional<absl::Time>& since) {
  return since.has_value() ? DurationText(AgeAt(now, *since)) : "–";
}

// Pieces of the page. They take text and escape it; rows take cells, which are markup.

std::string Badge(std::string_view text, const char* of_class) {
  return absl::StrCat("<span class=\"badge ", of_class, "\">", Escape(text), "</span>");
}

std::string Card(std::string_view name, std::string_view value, std::string_view more = "") {
  return absl::StrCat("<div class=\"card\"><span class=\"soft\">", Escape(name), "</span><b>", Escape(value),
                      "</b><span class=\"soft\">", Escape(more), "</span></div>\n");
}

std::string Table(const std::vector<Column>& columns, const std::vector<std::vector<std::string>>& rows) {
  std::string table = "<div class=\"table\"><table><thead><tr>";
  for (const Column& column : columns) {
    absl::StrAppend(&table, "<th class=\"", column.of_cell, "\">", Escape(column.name), "</th>");
  }
  table += "</tr></thead><tbody>\n";
  for (const std::vector<std::string>& row : rows) {
    table += "<tr>";
    for (size_t i = 0; i < row.size(); ++i) {
      // On a narrow screen a row is a list, where each cell says what it is.
      absl::StrAppend(&table, "<td class=\"", columns[i].of_cell, "\" data-name=\"", Escape(columns[i].name),
                      "\">", row[i], "</td>");
    }
    table += "</tr>\n";
  }
  return table + "</tbody></table></div>\n";
}

std::string Bar(const std::vector<Part>& parts, double whole) {
  std::string title;
  std::string bar;
  double at = 0;
  for (const Part& part : parts) {
    const double width = whole > 0 ? std::clamp(part.bytes / whole * kBarUnits, 0.0, kBarUnits - at) : 0;
    absl::StrAppendFormat(&bar, "<rect class=\"p%d\" x=\"%.2f\" width=\"%.2f\" height=\"10\"/>", part.color,
                          at, width);
    at += width;
    absl::StrAppend(&title, title.empty() ? "" : ", ", part.name, " ", BytesText(part.bytes));
  }
  return absl::StrCat(
      "<svg class=\"bar\" viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" role=\"img\"><title>",
      Escape(title), "</title>", bar, "</svg>");
}

std::string MemoryRow(std::string_view name, const std::vector<Part>& parts, double used, double whole) {
  return absl::StrCat("<span>", Escape(name), "</span>", Bar(parts, whole), "<span>", BytesText(used), " of ",
                      BytesText(whole), "</span>\n");
}

// Sections

std::string StateBadge(const ServerStatus& status) {
  if (status.draining) return Badge("draining", "warn");
  const auto stuck = [&status](const engine::RankReport& rank) { return status.group.IsStuck(rank); };
  if (std::any_of(status.group.ranks.begin(), status.group.ranks.end(), stuck)) {
    return Badge("not ready: a rank is stuck", "bad");
  }
  return status.serving ? Badge("serving", "good") : Badge("starting", "warn");
}

// Nothing where heads are the server's own.
std::string SetBadge(const engine::ReplicaReport& set) {
  if (!set.IsSet()) return "";
  const std::string place = absl::StrCat("replica ", set.place.replica, " of ", set.place.replicas);
  if (set.whole.ok()) return Badge(place, "good");
  return Badge(absl::StrCat(place, ": not all are there"), "bad");
}

std::string Head(const ServerStatus& status) {
  std::string head = absl::StrCat("<header><h1>lossd ", Escape(status.version), "</h1>");
  head += StateBadge(status);
  head += SetBadge(status.replicas);
  absl::StrAppend(&head, "<span>", Escape(status.device_description), "</span><span class=\"soft\">up ",
                  DurationText(AgeAt(status.now, status.started)), " · incarnation ",
                  Escape(WithoutIds(status.incarnation)), " · ",
                  absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", status.now, absl::UTCTimeZone()),
                  "</span></header>\n");
  return head;
}

std::string Sparkline(const std::vector<double>& values) {
  const double most = values.empty() ? 0 : *std::max_element(values.begin(), values.end());
  std::string points;
  const auto columns = static_cast<double>(WorkHistory::kMost - 2);
  const double first = columns - static_cast<double>(values.size()) + 1;
  for (size_t i = 0; i < values.size(); ++i) {
    const double height = most > 0 ? values[i] / most : 0;
    absl::StrAppendFormat(&points, "%.0f,%.1f ", first + static_cast<double>(i), 31 - 30 * height);
  }
  return absl::StrCat(
      "<svg class=\"spark\" viewBox=\"0 0 ", columns,
      " 32\" preserveAspectRatio=\"none\" role=\"img\"><title>tokens per second over the last "
      "two minutes, up to ",
      CountText(most), "</title><polyline points=\"", points, "\"/></svg>");
}

std::string Work(const ServerStatus& status) {
  const WorkRates& rates = status.throughput.rates;
  return absl::StrCat(
      "<div class=\"cards\">\n<div class=\"card wide\"><span class=\"soft\">Tokens per second</span><b>",
      CountText(rates.tokens), "</b>", Sparkline(status.throughput.tokens_per_second), "</div>\n",
      Card("Chunks per s", CountText(rates.chunks)),
      Card("In", absl::StrCat(BytesText(rates.bytes_in), "/s")),
      Card("Out", absl::StrCat(BytesText(rates.bytes_out), "/s")),
      Card("Queue", absl::StrCat(CountText(static_cast<double>(status.queued_chunks)), " chunks"),
           absl::StrCat(BytesText(static_cast<double>(status.credit_bytes)), " under way")),
      Card("Sessions", CountText(static_cast<double>(status.sessions)),
           absl::StrCat(status.streams, " streams")),
      "</div>\n");
}

std::string Phase(engine::WindowState state) {
  return Badge(engine::Name(state), state == engine::WindowState::kOpen ? "good" : "warn");
}

// Below those that are on the device.
std::string ParkedHeads(const ServerStatus& status) {
  if (status.parked.empty()) return "";
  std::vector<std::string> texts;
  for (const auto& [name, bytes] : status.parked) {
    texts.push_back(absl::StrCat(Escape(name), " (", BytesText(static_cast<double>(bytes)), ")"));
  }
  return absl::StrCat("<p class=\"soft\">Parked in the host's memory, until they are used: ",
                      absl::StrJoin(texts, ", "), "</p>\n");
}

std::string Heads(const ServerStatus& status) {
  if (status.heads.empty()) {
    return absl::StrCat("<h2>Heads</h2><p class=\"soft\">There are none ",
                        status.parked.empty() ? "yet" : "on the device", ".</p>\n", ParkedHeads(status));
  }
  std::vector<std::vector<std::string>> rows;
  for (const HeadStatus& head : status.heads) {
    const engine::HeadSnapshot& snapshot = head.snapshot;
    const std::string flush =
        snapshot.flush_since.has_value() ? absl::StrCat(" ", AgeText(status.now, snapshot.flush_since)) : "";
    rows.push_back(
        {Escape(head.name), absl::StrCat(head.vocab_size, " × ", head.hidden_size), Escape(head.weight_type),
         absl::StrCat(snapshot.weight_version), absl::StrCat(snapshot.generation),
         head.frozen ? Badge("no gradient", "soft") : Phase(snapshot.window_state) + flush,
         CountText(static_cast<double>(snapshot.window_tokens)), AgeText(status.now, snapshot.window_since),
         absl::StrCat(snapshot.open_sessions), absl::StrCat(head.queued_chunks),
         snapshot.steps_since_checkpoint.has_value() ? absl::StrCat(*snapshot.steps_since_checkpoint) : "–",
         HasLoss(head) ? ValueText(head.loss) : "–",
         head.gradient_norm != 0 ? ValueText(head.gradient_norm) : "–"});
  }
  return "<h2>Heads</h2>\n" +
         Table({{"name"},
                {"V × H"},
                {"dtype"},
                {"weights"},
                {"generation"},
                {"window", "text"},
                {"tokens"},
                {"age"},
                {"sessions"},
                {"queued"},
                {"steps not saved"},
                {"loss"},
                {"‖dW‖"}},
               rows) +
         ParkedHeads(status);
}

// The colour of memory without a purpose of the engine, behind the colours of those.
constexpr int kOtherColor = static_cast<int>(engine::kMemoryPurposes.size());

// Colours by purpose, so that they stay where they are.
int ColorOf(absl::string_view purpose) {
  const auto& purposes = engine::kMemoryPurposes;
  return static_cast<int>(std::find(purposes.begin(), purposes.end(), purpose) - purposes.begin());
}

std::vector<Part> PartsOf(const engine::MemoryPlan& plan) {
  std::vector<Part> parts;
  for (const engine::MemoryItem& item : plan) {
    parts.push_back({absl::StrCat(item.purpose, " (", engine::Name(item.place), ")"),
                     static_cast<double>(item.bytes), ColorOf(item.purpose)});
  }
  return parts;
}

std::string Memory(const ServerStatus& status) {
  const auto limit = static_cast<double>(status.memory_limit);
  const auto reserved = static_cast<double>(status.memory_reserved);
  const std::vector<Part> parts = PartsOf(status.memory);
  std::string rows = MemoryRow("reserved", parts, reserved, limit);
  for (const HeadStatus& head : status.heads) {
    const auto of_head = static_cast<double>(engine::TotalBytes(head.memory));
    rows += MemoryRow(absl::StrCat("– ", head.name), PartsOf(head.memory), of_head, limit);
  }
  const auto plain = [&rows](std::string_view name, int64_t used_bytes, int64_t whole) {
    const auto used = static_cast<double>(used_bytes);
    if (whole > 0) rows += MemoryRow(name, {{"used", used, kOtherColor}}, used, static_cast<double>(whole));
  };
  const engine::DeviceTotals& device = status.device_memory;
  plain(absl::StrCat(status.device, ", by all"), device.total_bytes - device.free_bytes, device.total_bytes);
  plain("pinned pool", status.pinned_pool.used, status.pinned_pool.capacity);
  plain("credits of sessions", status.staging_reserved, status.staging_limit);
  std::string legend;
  for (const Part& part : parts) {
    absl::StrAppend(&legend, "<span><svg viewBox=\"0 0 1 1\"><rect class=\"p", part.color,
                    "\" width=\"1\" height=\"1\"/></svg> ", Escape(part.name), " ", BytesText(part.bytes),
                    "</span>\n");
  }
  return absl::StrCat("<h2>Memory</h2>\n<div class=\"table\"><div class=\"memory\">\n", rows,
                      "</div><div class=\"legend\">\n", legend, "<span class=\"soft\">most ever reserved ",
                      BytesText(static_cast<double>(status.memory_peak)),
                      "</span>\n<span class=\"soft\">process ",
                      BytesText(static_cast<double>(status.process.resident_bytes)), ", at most ",
                      BytesText(static_cast<double>(status.process.peak_bytes)), "</span></div></div>\n");
}

// What a rank is at, and for how long.
std::string AtWork(const engine::RankActivity& activity, bool stuck) {
  if (activity.command.empty()) return "–";
  const std::string at = absl::StrCat(Escape(activity.command), " ", DurationText(activity.command_seconds));
  return stuck ? absl::StrCat(Badge("stuck", "bad"), " ", at) : at;
}

std::string WaitedText(const engine::RankActivity& activity) {
  const double waited = activity.waited_seconds();
  if (activity.uptime_seconds <= 0) return DurationText(waited);
  return absl::StrFormat("%s (%.1f %%)", DurationText(waited), 100 * waited / activity.uptime_seconds);
}

std::string Ranks(const ServerStatus& status) {
  if (!status.group.IsGroup()) return "";
  const auto of = [](int64_t used, int64_t whole) {
    return absl::StrCat(BytesText(static_cast<double>(used)), " of ", BytesText(static_cast<double>(whole)));
  };
  std::vector<std::vector<std::string>> rows;
  for (const engine::RankReport& rank : status.group.ranks) {
    const engine::DeviceTotals& totals = rank.totals;
    const auto& waits_at = rank.activity.waits_at;
    rows.push_back(
        {absl::StrCat(rows.size()), Escape(rank.host),
         Escape(rank.pci_bus_id.empty() ? rank.device : absl::StrCat(rank.device, ", ", rank.pci_bus_id)),
         of(rank.memory.reserved, rank.memory_limit),
         of(totals.total_bytes - totals.free_bytes, totals.total_bytes),
         BytesText(static_cast<double>(rank.process.resident_bytes)), WaitedText(rank.activity),
         AtWork(rank.activity, status.group.IsStuck(rank)),
         waits_at.has_value() ? Escape(kernels::Name(*waits_at)) : "–"});
  }
  return absl::StrCat("<h2>Ranks, epoch ", status.group.epoch, "</h2>\n",
                      Table({{"rank"},
                             {"host", "text"},
                             {"device", "text"},
                             {"reserved"},
                             {"device, by all"},
                             {"process"},
                             {"waited for others"},
                             {"command", "text"},
                             {"waits now at", "text"}},
                            rows));
}

std::string Replicas(const engine::ReplicaReport& set) {
  if (!set.IsSet()) return "";
  const std::string why_not = set.WhyNot();
  std::string section = absl::StrCat(
      "<h2>Replicas, set ", Escape(set.name), "</h2>\n<p>",
      set.whole.ok() ? Badge("all are there", "good") + " " : "",
      why_not.empty() ? "" : absl::StrCat(Badge("no window ends", "bad"), " ", Escape(why_not)),
      " <span class=\"soft\">this is ", set.place.replica, " of ", set.place.replicas, " · all have met ",
      set.epochs, " times · went back to a checkpoint ", set.returns, " times</span></p>\n");
  if (set.replicas.empty()) return section;
  std::vector<Column> columns = {{"replica"}, {"sessions placed"}};
  static constexpr std::array kLate = {"late to seal", "late to sum", "late to step", "late to flush"};
  static_assert(kLate.size() == engine::kReplicaPhases.size());
  for (const char* late : kLate) columns.push_back({late});
  std::vector<std::vector<std::string>> rows;
  for (const engine::ReplicaReport::Answers& answers : set.replicas) {
    std::vector<std::string> row = {absl::StrCat(rows.size()),
                                    CountText(static_cast<double>(answers.sessions_placed))};
    for (const double seconds : answers.late_seconds) {
      row.push_back(absl::StrFormat("%.1f ms", 1e3 * seconds));
    }
    rows.push_back(std::move(row));
  }
  return section + Table(columns, rows);
}

std::string Sessions(const ServerStatus& status) {
  std::vector<std::vector<std::string>> rows;
  size_t all = 0;
  for (const HeadStatus& head : status.heads) {
    all += head.sessions.size();
    for (const engine::SessionSnapshot& session : head.sessions) {
      if (rows.size() == kMostSessions) break;
      rows.push_back({Escape(head.name), absl::StrCat(session.number), absl::StrCat(session.rank),
                      absl::StrCat(session.streams, " of ", session.lanes), absl::StrCat(session.accepted),
                      absl::StrCat(session.applied), DurationText(absl::ToDoubleSeconds(session.idle))});
    }
  }
  if (rows.empty()) return "<h2>Sessions</h2><p class=\"soft\">None is open.</p>\n";
  std::string section = "<h2>Sessions</h2>\n" + Table({{"head"},
                                                       {"session"},
                                                       {"rank"},
                                                       {"lanes with a stream"},
                                                       {"chunks in the window"},
                                                       {"applied"},
                                                       {"last chunk or call"}},
                                                      rows);
  if (all > rows.size()) {
    absl::StrAppend(&section, "<p class=\"soft\">and ", all - rows.size(), " more</p>\n");
  }
  return section;
}

std::string Calls(const ServerStatus& status) {
  if (status.calls.empty()) return "<h2>Calls under way</h2><p class=\"soft\">None.</p>\n";
  std::vector<std::vector<std::string>> rows;
  for (const MethodStatus& call : status.calls) {
    rows.push_back({Escape(call.method), absl::StrCat(call.in_flight)});
  }
  return "<h2>Calls under way</h2>\n" + Table({{"method"}, {"calls"}}, rows);
}

std::string Errors(const ServerStatus& status) {
  if (status.errors.empty()) return "<h2>Recent errors</h2><p class=\"soft\">None since the start.</p>\n";
  std::vector<std::vector<std::string>> rows;
  for (const RecentError& error : status.errors) {
    rows.push_back({absl::FormatTime("%m-%d %H:%M:%S", error.time, absl::UTCTimeZone()), Escape(error.method),
                    Badge(StatusCodeName(error.code), "bad"), Escape(error.message),
                    error.trace_id.empty() ? "–" : Escape(error.trace_id)});
  }
  return "<h2>Recent errors</h2>\n" + Table({{"time (UTC)"},
                                             {"method", "text"},
                                             {"code", "text"},
                                             {"message", "text wrap"},
                                             {"trace", "text wrap"}},
                                            rows);
}

}  // namespace

HttpPage StatusPage(const ServerStatus& status) {
  const std::string nonce = engine::RandomId();
  HttpPage page;
  page.content_type = "text/html; charset=utf-8";
  // No asset of anybody's, no form, no frame; style and script are those of this document.
  page.headers = {
      {"Content-Security-Policy",
       absl::StrCat("default-src 'none'; style-src 'nonce-", nonce, "'; script-src 'nonce-", nonce,
                    "'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors "
                    "'none'")},
      {"Referrer-Policy", "no-referrer"}};
  page.body = absl::StrCat(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n",
      "<noscript><meta http-equiv=\"refresh\" content=\"5\"></noscript>\n<title>lossd on ",
      Escape(status.device), status.draining ? ", draining" : "", "</title>\n<style nonce=\"", nonce, "\">",
      kStatusStyle, "</style>\n</head>\n<body>\n<main>\n", Head(status), Work(status), Heads(status),
      Memory(status), Ranks(status), Replicas(status.replicas), Sessions(status), Calls(status),
      Errors(status),
      "<footer class=\"soft\"><a href=\"/metrics\">metrics</a> · <a href=\"/status.json\">status.json</a>",
      "</footer>\n</main>\n<script nonce=\"", nonce, "\">", kStatusScript, "</script>\n</body>\n</html>\n");
  return page;
}

}  // namespace lossd::telemetry
