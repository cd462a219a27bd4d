#include "client/tools/perf/report.h"

#include <array>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/perf/percentiles.h"
#include "client/tools/perf/stages.h"
#include "client/tools/progress_bar.h"

namespace lossd::perf {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kGigabyte = 1e9;
constexpr double kMilliseconds = 1e3;

Json Milliseconds(const Summary& summary) {
  return {{"mean", summary.mean * kMilliseconds}, {"p50", summary.p50 * kMilliseconds},
          {"p90", summary.p90 * kMilliseconds},   {"p99", summary.p99 * kMilliseconds},
          {"max", summary.max * kMilliseconds},   {"samples", summary.count}};
}

Json Milliseconds(const Histogram& histogram) {
  Json json = {{"mean", nullptr}};
  if (histogram.count > 0) json["mean"] = histogram.sum / histogram.count * kMilliseconds;
  for (const auto& [name, share] : {std::pair{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}}) {
    json[name] = Quantile(histogram, share) * kMilliseconds;
  }
  json["samples"] = static_cast<int64_t>(histogram.count);
  return json;
}

Json Stages(const Span<Metrics>& metrics) {
  const auto between = [&metrics](const std::string& name, const std::string& label) {
    return Difference(HistogramOf(metrics.before, name, label), HistogramOf(metrics.after, name, label));
  };
  Json json = Json::object();
  for (const char* stage : {"queue", "forward", "weight_gradient"}) {
    json[stage] = Milliseconds(between("lossd_chunk_seconds", absl::StrCat("stage=\"", stage, "\"")));
  }
  const Histogram rows = between("lossd_batch_rows", "");
  json["tokens_per_device_batch"] = nullptr;
  if (rows.count > 0) json["tokens_per_device_batch"] = rows.sum / rows.count;
  return json;
}

Json ChunkStages(std::span<const ChunkTiming> timings) {
  if (timings.empty()) return nullptr;
  StageSamples samples = SplitIntoStages(timings);
  Json json = {{"upload", Milliseconds(Summarize(std::move(samples.upload)))},
               {"queue", Milliseconds(Summarize(std::move(samples.queue)))},
               {"copy", Milliseconds(Summarize(std::move(samples.copy)))},
               {"compute", Milliseconds(Summarize(std::move(samples.compute)))},
               {"download", Milliseconds(Summarize(std::move(samples.download)))},
               {"hidden_share", nullptr},
               {"clock_error", samples.clock_error * kMilliseconds}};
  if (const auto share = HiddenShare(timings)) json["hidden_share"] = *share;
  return json;
}

Json Errors(const LoadResult& load) {
  int64_t total = 0;
  Json by_code = Json::object();
  for (const auto& [code, count] : load.errors) {
    total += count;
    by_code[absl::StatusCodeToString(code)] = count;
  }
  const auto exhausted = load.errors.find(absl::StatusCode::kResourceExhausted);
  Json json = {{"total", total},
               {"resource_exhausted", exhausted == load.errors.end() ? 0 : exhausted->second},
               {"by_code", by_code},
               {"wrong_results", load.wrong_results}};
  if (!load.first_error.empty()) json["first"] = load.first_error;
  return json;
}

Json Flushes(const std::vector<FlushTimes>& flushes) {
  if (flushes.empty()) return nullptr;
  Json json = Json::object();
  for (const FlushTimes& times : flushes) {
    const Summary summary = Summarize(times.seconds);
    Json& entry = json[Name(times.type)];
    entry = {{"bytes", times.bytes},
             {"norm", times.norm},
             {"ms", Milliseconds(summary)},
             {"gb_per_second", nullptr}};
    if (summary.count > 0) {
      entry["gb_per_second"] = static_cast<double>(times.bytes) / kGigabyte / summary.p50;
    }
  }
  return json;
}

Json Cpu(const std::optional<Span<double>>& cpu, double gigabytes) {
  if (!cpu || cpu->before < 0 || cpu->after < 0) return nullptr;
  const double seconds = cpu->after - cpu->before;
  Json json = {{"seconds", seconds}, {"seconds_per_gb", nullptr}};
  if (gigabytes > 0) json["seconds_per_gb"] = seconds / gigabytes;
  return json;
}

// A number of the report with its unit, or a dash.
std::string Number(const Json& value, const char* format = "%.2f") {
  if (!value.is_number()) return "-";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value.get<double>());
  return text.data();
}

std::string Latencies(const Json& json) {
  std::string text =
      absl::StrCat("p50 ", Number(json["p50"]), "  p90 ", Number(json["p90"]), "  p99 ", Number(json["p99"]));
  if (json.contains("max")) absl::StrAppend(&text, "  max ", Number(json["max"]));
  return absl::StrCat(text, "  mean ", Number(json["mean"]), " ms");
}

std::string ErrorsText(const Json& errors) {
  std::string text = absl::StrCat(errors["total"].get<int64_t>(), " calls failed");
  for (const auto& [code, count] : errors["by_code"].items()) {
    absl::StrAppend(&text, ", ", code, " ", count.get<int64_t>());
  }
  absl::StrAppend(&text, "; ", errors["wrong_results"].get<int64_t>(), " wrong results");
  if (errors.contains("first")) {
    absl::StrAppend(&text, "\n              ", errors["first"].get<std::string>());
  }
  return text;
}

std::string SettingsText(const Json& report) {
  const Json& settings = report["settings"];
  return absl::StrFormat(
      "%s, %s tokens a batch, head %s x %s %s, clients: %d, lanes: %d, %s loop%s",
      settings["transport"].get<std::string>(), tools::WithCommas(settings["tokens"].get<int64_t>()),
      tools::WithCommas(settings["vocab"].get<int64_t>()),
      tools::WithCommas(settings["hidden"].get<int64_t>()), settings["weight_dtype"].get<std::string>(),
      settings["clients"].get<int64_t>(), report["session_lanes"].get<int64_t>(),
      settings["loop"].get<std::string>(),
      settings["rate"].is_null() ? "" : absl::StrCat(", ", Number(settings["rate"]), " batches/s arrive"));
}

std::string CpuText(const Json& cpu) {
  if (cpu.is_null()) return "not known";
  return absl::StrCat(Number(cpu["seconds"]), " s, ", Number(cpu["seconds_per_gb"]), " s/GB");
}

// Empty where all are in one place.
std::string LanesText(const Json& lanes_at) {
  std::vector<std::string> places;
  for (const auto& [target, lanes] : lanes_at.items()) {
    places.push_back(absl::StrCat(lanes.get<int64_t>(), " at ", target));
  }
  return places.size() < 2 ? "" : absl::StrJoin(places, ", ");
}

}  // namespace

int64_t BytesIn(const Settings& settings) {
  return static_cast<int64_t>(sizeof(int64_t)) + settings.hidden * SizeOf(settings.hidden_type);
}

int64_t BytesOut(const Settings& settings) {
  const bool dx = settings.mode == ComputeMode::kLossAndGradients;
  return static_cast<int64_t>(sizeof(float)) + (dx ? settings.hidden * SizeOf(settings.dx_type) : 0);
}

bool Failed(const LoadResult& load) {
  return !load.errors.empty() || load.wrong_results > 0 || load.batches == 0;
}

Json Report(const Settings& settings, const Findings& findings) {
  const LoadResult& load = findings.load;
  const double in = static_cast<double>(load.tokens * BytesIn(settings)) / kGigabyte;
  const double out = static_cast<double>(load.tokens * BytesOut(settings)) / kGigabyte;
  const auto rate = [&load](double amount) {
    return load.seconds > 0 ? Json(amount / load.seconds) : Json();
  };
  // An arrival that was never sent has waited that long at least: leaving it out would flatter the server.
  std::vector<double> latencies = load.latencies;
  latencies.insert(latencies.end(), load.waited_in_vain.begin(), load.waited_in_vain.end());
  return {{"target", findings.target},
          {"server_version", findings.server_version},
          {"device", findings.device},
          {"settings", ToJson(settings)},
          {"check",
           {{"mean_loss", findings.check.mean_loss},
            {"log_vocab", findings.check.log_vocab},
            {"loss_error", findings.check.loss_error},
            {"dx_relative_error", findings.check.dx_error}}},
          {"seconds", load.seconds},
          {"session_lanes", load.lanes},
          {"lanes_at", load.lanes_at},
          {"batches", load.batches},
          {"chunks", load.chunks},
          {"tokens", load.tokens},
          {"batches_per_second", rate(static_cast<double>(load.batches))},
          {"tokens_per_second", rate(static_cast<double>(load.tokens))},
          {"payload_gb_per_second", {{"in", rate(in)}, {"out", rate(out)}}},
          {"latency_ms", Milliseconds(Summarize(std::move(latencies)))},
          {"never_sent", static_cast<int64_t>(load.waited_in_vain.size())},
          {"stages_ms", ChunkStages(load.timings)},
          {"server_stages_ms", findings.metrics ? Stages(*findings.metrics) : Json()},
          {"flushes", Flushes(findings.flushes)},
          {"cpu",
           {{"client", Cpu(findings.client_cpu, in + out)}, {"server", Cpu(findings.server_cpu, in + out)}}},
          {"server_memory",
           {{"peak_bytes", findings.memory.process_peak_bytes},
            {"reserved_bytes", findings.memory.reserved_bytes}}},
          {"reconnects", load.reconnects},
          {"errors", Errors(load)}};
}

std::string ReportText(const Json& report) {
  std::string text = absl::StrCat("lossd ", report["server_version"].get<std::string>(), " at ",
                                  report["target"].get<std::string>(), ", ",
                                  report["device"].get<std::string>(), "\n", SettingsText(report), "\n\n");
  const auto line = [&text](const char* name, const std::string& value) {
    absl::StrAppendFormat(&text, "  %-12s%s\n", name, value);
  };
  line("check",
       absl::StrCat("mean loss ", Number(report["check"]["mean_loss"], "%.4f"), ", log V ",
                    Number(report["check"]["log_vocab"], "%.4f"), "; one token against fp64: loss off by ",
                    Number(report["check"]["loss_error"], "%.1e"), ", dX by ",
                    Number(report["check"]["dx_relative_error"], "%.1e"), " of its norm"));
  line("measured",
       absl::StrCat(report["batches"].get<int64_t>(), " batches, ", report["chunks"].get<int64_t>(),
                    " chunks in ", Number(report["seconds"]), " s"));
  line("throughput", absl::StrCat(Number(report["tokens_per_second"], "%.0f"), " tokens/s, ",
                                  Number(report["payload_gb_per_second"]["in"], "%.4f"), " GB/s in, ",
                                  Number(report["payload_gb_per_second"]["out"], "%.4f"), " GB/s out"));
  if (const std::string lanes = LanesText(report["lanes_at"]); !lanes.empty()) line("lanes", lanes);
  line("latency", Latencies(report["latency_ms"]));
  if (const int64_t never = report["never_sent"].get<int64_t>(); never > 0) {
    line("", absl::StrCat("the server did not keep up: ", never,
                          " arrivals were never sent and count with the time they had waited"));
  }
  if (const Json& stages = report["stages_ms"]; !stages.is_null()) {
    for (const char* stage : {"upload", "queue", "copy", "compute", "download"}) {
      line(stage, Latencies(stages[stage]));
    }
    if (stages["hidden_share"].is_number()) {
      line("hidden", absl::StrFormat("%.0f %% of upload, copy and download, behind what the device computes",
                                     stages["hidden_share"].get<double>() * 100));
    }
  }
  if (const Json& stages = report["server_stages_ms"]; !stages.is_null()) {
    line("forward", Latencies(stages["forward"]));
    line("dW", Latencies(stages["weight_gradient"]));
  }
  for (const auto& [type, flush] : report["flushes"].items()) {
    line("flush",
         absl::StrCat("dW as ", type, ", ", tools::FormatBytes(flush["bytes"].get<int64_t>()), ": p50 ",
                      Number(flush["ms"]["p50"]), " ms, ", Number(flush["gb_per_second"]), " GB/s"));
  }
  line("client CPU", CpuText(report["cpu"]["client"]));
  line("server CPU", CpuText(report["cpu"]["server"]));
  line("memory",
       absl::StrCat("server's peak ",
                    tools::FormatBytes(report["server_memory"]["peak_bytes"].get<int64_t>()), ", reserved ",
                    tools::FormatBytes(report["server_memory"]["reserved_bytes"].get<int64_t>())));
  line("errors", ErrorsText(report["errors"]));
  return text;
}

}  // namespace lossd::perf
