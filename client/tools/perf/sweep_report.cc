// The tables of a sweep.
#include <array>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/tools/perf/sweep.h"

namespace lossd::perf {
namespace {

using Json = nlohmann::ordered_json;

struct Column {
  const char* name;
  const char* pointer;
  const char* title;  // in sweep.md; null: not there
  const char* format;
};

constexpr std::array kColumns = {
    Column{"transport", "/settings/transport", "transport", ""},
    Column{"clients", "/settings/clients", "clients", "%.0f"},
    Column{"tokens", "/settings/tokens", "tokens", "%.0f"},
    Column{"chunk_bytes", "/settings/chunk_bytes", "chunk bytes", "%.0f"},
    Column{"lanes", "/settings/lanes", "lanes", "%.0f"},
    Column{"session_lanes", "/session_lanes", nullptr, ""},
    Column{"vocab", "/settings/vocab", nullptr, ""},
    Column{"hidden", "/settings/hidden", nullptr, ""},
    Column{"batches", "/batches", "batches", "%.0f"},
    Column{"tokens_per_second", "/tokens_per_second", "tokens/s", "%.0f"},
    Column{"gb_per_second_in", "/payload_gb_per_second/in", "GB/s in", "%.4f"},
    Column{"gb_per_second_out", "/payload_gb_per_second/out", "GB/s out", "%.4f"},
    Column{"latency_p50_ms", "/latency_ms/p50", "p50, ms", "%.2f"},
    Column{"latency_p90_ms", "/latency_ms/p90", "p90, ms", "%.2f"},
    Column{"latency_p99_ms", "/latency_ms/p99", "p99, ms", "%.2f"},
    Column{"latency_max_ms", "/latency_ms/max", "max, ms", "%.2f"},
    Column{"upload_p50_ms", "/stages_ms/upload/p50", nullptr, ""},
    Column{"queue_p50_ms", "/stages_ms/queue/p50", nullptr, ""},
    Column{"copy_p50_ms", "/stages_ms/copy/p50", nullptr, ""},
    Column{"compute_p50_ms", "/stages_ms/compute/p50", nullptr, ""},
    Column{"download_p50_ms", "/stages_ms/download/p50", nullptr, ""},
    Column{"hidden_share", "/stages_ms/hidden_share", "hidden", "%.2f"},
    Column{"forward_p50_ms", "/server_stages_ms/forward/p50", nullptr, ""},
    Column{"weight_gradient_p50_ms", "/server_stages_ms/weight_gradient/p50", nullptr, ""},
    Column{"client_cpu_s_per_gb", "/cpu/client/seconds_per_gb", "client CPU, s/GB", "%.2f"},
    Column{"server_cpu_s_per_gb", "/cpu/server/seconds_per_gb", "server CPU, s/GB", "%.2f"},
    Column{"server_peak_bytes", "/server_memory/peak_bytes", nullptr, ""},
    Column{"errors", "/errors/total", "errors", "%.0f"},
    Column{"resource_exhausted", "/errors/resource_exhausted", nullptr, ""},
    Column{"wrong_results", "/errors/wrong_results", nullptr, ""},
    Column{"problem", "/error", "problem", ""},
};

// Null where the path is not there.
Json At(const Json& one, const char* pointer) {
  const Json::json_pointer where(pointer);
  return one.contains(where) ? one.at(where) : Json();
}

std::string Text(const Json& value) {
  if (value.is_null()) return "";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string Formatted(const Json& value, const char* format) {
  if (value.is_string()) return absl::StrReplaceAll(value.get<std::string>(), {{"\n", " "}, {"|", "/"}});
  if (!value.is_number()) return "";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value.get<double>());
  return text.data();
}

std::string Quoted(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

}  // namespace

std::string SweepCsv(const Json& sweep) {
  std::string text;
  for (const Column& column : kColumns) absl::StrAppend(&text, text.empty() ? "" : ",", column.name);
  for (const Json& one : sweep["cases"]) {
    const char* separator = "\n";
    for (const Column& column : kColumns) {
      absl::StrAppend(&text, separator, Quoted(Text(At(one, column.pointer))));
      separator = ",";
    }
  }
  return text + "\n";
}

std::string SweepMarkdown(const Json& sweep) {
  std::string text = absl::StrCat("`", Text(sweep["command"]), "`, ", Text(sweep["time"]), "\n\n|");
  std::string rule = "|";
  for (const Column& column : kColumns) {
    if (column.title == nullptr) continue;
    absl::StrAppend(&text, " ", column.title, " |");
    rule += "---|";
  }
  absl::StrAppend(&text, "\n", rule, "\n");
  for (const Json& one : sweep["cases"]) {
    text += '|';
    for (const Column& column : kColumns) {
      if (column.title == nullptr) continue;
      absl::StrAppend(&text, " ", Formatted(At(one, column.pointer), column.format), " |");
    }
    text += '\n';
  }
  return text;
}

std::string CaseLine(const Json& one) {
  std::string line = absl::StrCat(
      Text(At(one, "/settings/transport")), ", ", Text(At(one, "/settings/clients")), " clients, ",
      Text(At(one, "/settings/tokens")), " tokens, chunk bytes ", Text(At(one, "/settings/chunk_bytes")),
      ", lanes ", Text(At(one, "/settings/lanes")), ": ");
  if (one.contains("error")) return line + Text(one["error"]);
  return absl::StrCat(line, Formatted(At(one, "/tokens_per_second"), "%.0f"), " tokens/s, p50 ",
                      Formatted(At(one, "/latency_ms/p50"), "%.2f"), " ms, p99 ",
                      Formatted(At(one, "/latency_ms/p99"), "%.2f"), " ms, ",
                      Formatted(At(one, "/errors/total"), "%.0f"), " errors");
}

}  // namespace lossd::perf
