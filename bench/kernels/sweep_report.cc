#include "bench/kernels/sweep_report.h"

#include <array>
#include <cstdio>
#include <fstream>
#include <functional>
#include <sstream>
#include <vector>

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;

// Null where the path is not there.
Json At(const Json& one, const char* pointer) {
  const Json::json_pointer where(pointer);
  return one.contains(where) ? one.at(where) : Json();
}

std::string Text(const Json& value) {
  if (value.is_null()) return "";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string Number(const Json& value, const char* format, double factor = 1) {
  if (!value.is_number()) return "–";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value.get<double>() * factor);
  return text.data();
}

std::string Quoted(std::string text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  for (size_t at = 0; (at = text.find('"', at)) != std::string::npos; at += 2) text.insert(at, 1, '"');
  return "\"" + text + "\"";
}

struct Column {
  const char* name;
  const char* pointer;
};

constexpr std::array kCsvColumns = {
    Column{"name", "/name"},
    Column{"tokens", "/tokens"},
    Column{"vocab", "/vocab"},
    Column{"hidden", "/hidden"},
    Column{"dtype", "/dtype"},
    Column{"ratio", "/ratio"},
    Column{"milliseconds", "/milliseconds"},
    Column{"limit_milliseconds", "/limit_milliseconds"},
    Column{"tflops", "/tflops"},
    Column{"limit_tflops", "/limit_tflops"},
    Column{"gigabytes_per_second", "/step/gigabytes_per_second"},
    Column{"forward_ratio", "/forward_only/ratio"},
    Column{"peak_bytes", "/peak_bytes"},
    Column{"peak_bytes_above_weights_and_gradient", "/peak_bytes_above_weights_and_gradient"},
    Column{"tile_rows", "/tile_rows"},
    Column{"rows_redone", "/rows_redone"},
    Column{"error_loss", "/relative_error/loss"},
    Column{"error_dx", "/relative_error/dx"},
    Column{"error_dw", "/relative_error/dw"},
    Column{"problem", "/error"},
};

std::string Csv(const Json& sweep) {
  std::ostringstream out;
  for (size_t i = 0; i < kCsvColumns.size(); ++i) out << (i > 0 ? "," : "") << kCsvColumns[i].name;
  out << "\n";
  for (const Json& one : sweep["cases"]) {
    for (size_t i = 0; i < kCsvColumns.size(); ++i) {
      out << (i > 0 ? "," : "") << Quoted(Text(At(one, kCsvColumns[i].pointer)));
    }
    out << "\n";
  }
  return out.str();
}

std::string Shape(const Json& one) {
  const std::string name = Text(At(one, "/name"));
  return (name.empty() ? "" : name + ": ") + Text(one["tokens"]) + ", " + Text(one["vocab"]) + ", " +
         Text(one["hidden"]) + " " + Text(one["dtype"]);
}

// Milliseconds of a stage, or of a bare product, by its name.
Json TimeOf(const Json& parts, const char* name) {
  for (const Json& part : parts) {
    if (part.value("name", "") == name) return part["milliseconds"];
  }
  return {};
}

std::string Markdown(const Json& sweep) {
  constexpr double kMebibyte = 1.0 / (1 << 20);
  std::ostringstream out;
  std::string hardware;
  for (const Json& one : sweep["cases"]) {
    if (hardware.empty()) hardware = Text(At(one, "/hardware"));
  }
  out << "# Fused step against its limit\n\n"
      << (hardware.empty() ? "nothing ran" : hardware) << ", " << Text(sweep["time"]) << "\n\n    "
      << Text(sweep["command"]) << "\n\n"
      << "| N, V, H | fused, ms | limit, ms | ratio | TFLOP/s | limit's | forward only, ratio | logits, dX, "
         "dW, ms (bare) "
         "| peak MiB above weights, gradient, X, dX | rows at once | relative error: loss, dX, dW |\n"
      << "|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const Json& one : sweep["cases"]) {
    out << "| " << Shape(one) << " | ";
    if (const std::string problem = Text(At(one, "/error")); !problem.empty()) {
      out << problem << " | | | | | | | | | |\n";
      continue;
    }
    out << Number(one["milliseconds"], "%.2f") << " | " << Number(one["limit_milliseconds"], "%.2f") << " | "
        << Number(one["ratio"], "%.3f") << " | " << Number(one["tflops"], "%.4g") << " | "
        << Number(one["limit_tflops"], "%.4g") << " | " << Number(At(one, "/forward_only/ratio"), "%.3f")
        << " | ";
    const std::array names = {"logits", "dx", "dw"};
    for (const char* name : names) {
      out << (name == names[0] ? "" : ", ") << Number(TimeOf(one["stages"], name), "%.2f") << " ("
          << Number(TimeOf(one["products"], name), "%.2f") << ")";
    }
    out << " | " << Number(one["peak_bytes"], "%.0f", kMebibyte) << " | " << Text(one["tile_rows"]) << " | "
        << Number(At(one, "/relative_error/loss"), "%.1e") << ", "
        << Number(At(one, "/relative_error/dx"), "%.1e") << ", "
        << Number(At(one, "/relative_error/dw"), "%.1e") << " |\n";
  }
  out << "\nThe limit: the three matrix products of the whole batch, bare, in the same run and in turns with "
         "the step. "
         "Medians; the ratio is\nthe median of each round's own. Every result was checked against fp64 "
         "before it was "
         "timed.\n";
  return out.str();
}

}  // namespace

std::string WriteReports(const Json& sweep, const std::string& folder) {
  const std::array<std::pair<const char*, std::string>, 3> files = {
      {{"/sweep.json", sweep.dump(2) + "\n"}, {"/sweep.csv", Csv(sweep)}, {"/sweep.md", Markdown(sweep)}}};
  for (const auto& [name, text] : files) {
    std::ofstream file(folder + name, std::ios::binary | std::ios::trunc);
    file << text;
    if (!file.flush()) return folder + name;
  }
  return "";
}

std::string CaseLine(const Json& one) {
  const std::string shape = Shape(one);
  if (const std::string problem = Text(At(one, "/error")); !problem.empty()) return shape + ": " + problem;
  return shape + ": " + Number(one["milliseconds"], "%.2f") + " ms, limit " +
         Number(one["limit_milliseconds"], "%.2f") + ", ratio " + Number(one["ratio"], "%.3f") + ", " +
         Number(one["tflops"], "%.4g") + " TFLOP/s";
}

}  // namespace lossd::bench
