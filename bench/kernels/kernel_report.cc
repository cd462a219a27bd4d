#include "bench/kernels/kernel_report.h"

#include <cstdio>
#include <string>

#include "bench/kernels/command_line.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;

double Tflops(const Measurement& part) { return part.work.operations / part.milliseconds * 1e-9; }
double GigabytesPerSecond(const Measurement& part) { return part.work.bytes / part.milliseconds * 1e-6; }
double Mebibytes(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

Json ToJson(const std::vector<Measurement>& parts) {
  Json json = Json::array();
  for (const Measurement& part : parts) json.push_back(ToJson(part));
  return json;
}

std::string Number(bool known, const char* format, double value) {
  if (!known) return "-";
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

void PrintPart(const char* indent, const Measurement& part) {
  const bool known = part.milliseconds > 0;
  std::printf("    %-24s %10.3f %10s %10s %10s\n", (indent + part.name).c_str(), part.milliseconds,
              Number(known && part.work.operations > 0, "%.3f", Tflops(part)).c_str(),
              Number(part.work.bytes > 0, "%.3f", part.work.bytes * 1e-9).c_str(),
              Number(known && part.work.bytes > 0, "%.1f", GigabytesPerSecond(part)).c_str());
}

void PrintParts(const KernelCase& c, const KernelResult& r) {
  std::printf("\n%lld tokens, vocabulary %lld, hidden %lld, %s; %lld rows at once\n",
              static_cast<long long>(c.tokens), static_cast<long long>(c.vocab),
              static_cast<long long>(c.hidden), ShortName(c.dtype).c_str(),
              static_cast<long long>(r.tile_rows));
  std::printf("    %-24s %10s %10s %10s %10s\n", "part", "ms", "TFLOP/s", "GB moved", "GB/s");
  PrintPart("", r.step);
  for (const Measurement& stage : r.stages) PrintPart("  ", stage);
  PrintPart("", r.limit);
  for (const Measurement& product : r.products) PrintPart("  ", product);
  if (r.forward.milliseconds > 0) {
    PrintPart("", r.forward);
    PrintPart("", r.forward_limit);
    std::printf("    forward only over the bare logits product: %.3f\n", r.forward_ratio);
    std::printf("    fused step over the bare logits product: %.3f\n", r.of_one_product);
    std::printf("    both, one after the other: %.3f\n", r.two_phases);
  }
  std::printf("    peak memory above weights and gradient: %.1f MiB; X, dX and losses are %.1f of them\n",
              Mebibytes(r.peak_bytes + r.batch_bytes), Mebibytes(r.batch_bytes));
}

}  // namespace

Json ToJson(const Measurement& part) {
  const bool timed = part.milliseconds > 0;
  Json json = {{"name", part.name},
               {"milliseconds", nullptr},
               {"tflops", nullptr},
               {"bytes", nullptr},
               {"gigabytes_per_second", nullptr}};
  if (timed) json["milliseconds"] = part.milliseconds;
  if (timed && part.work.operations > 0) json["tflops"] = Tflops(part);
  if (part.work.bytes > 0) json["bytes"] = static_cast<int64_t>(part.work.bytes);
  if (timed && part.work.bytes > 0) json["gigabytes_per_second"] = GigabytesPerSecond(part);
  return json;
}

Json ToJson(const KernelCase& c, const KernelResult& r) {
  const Json step = ToJson(r.step);
  const Json limit = ToJson(r.limit);
  Json json = {{"tokens", c.tokens},
               {"vocab", c.vocab},
               {"hidden", c.hidden},
               {"dtype", ShortName(c.dtype)},
               {"milliseconds", step["milliseconds"]},
               {"limit_milliseconds", limit["milliseconds"]},
               {"ratio", r.ratio},
               {"of_one_product", r.of_one_product},
               {"two_phases", r.two_phases},
               {"teacher_hidden", c.teacher_hidden},
               {"fixed_segments", c.segments == kernels::Segments::kFixed},
               {"tflops", step["tflops"]},
               {"limit_tflops", limit["tflops"]},
               {"peak_bytes", r.peak_bytes},
               {"batch_bytes", r.batch_bytes},
               {"peak_bytes_above_weights_and_gradient", r.peak_bytes + r.batch_bytes},
               {"relative_error",
                {{"loss", r.relative_error.loss}, {"dx", r.relative_error.dx}, {"dw", r.relative_error.dw}}},
               {"limit", r.limit_kind},
               {"workspace_bytes", c.workspace_bytes},
               {"tile_rows", r.tile_rows},
               {"rows_redone", r.rows_redone},
               {"ignored", c.ignored},
               {"lse_spread", c.lse_spread},
               {"options",
                {{"logit_scale", c.options.logit_scale},
                 {"softcap", c.options.softcap},
                 {"label_smoothing", c.options.label_smoothing},
                 {"lse_square_scale", c.options.lse_square_scale},
                 {"returns", c.returns},
                 {"entropy_gradient", c.entropy_gradient},
                 {"zeros", c.zeros},
                 {"held", c.held},
                 {"kept", c.kept},
                 {"longest", c.longest},
                 {"targets", c.targets}}},
               {"checked",
                {{"losses", c.tokens}, {"dx_rows", r.checked_rows}, {"dw_rows", r.checked_vocabulary_rows}}},
               {"step", step},
               {"stages", ToJson(r.stages)},
               {"bare", limit},
               {"products", ToJson(r.products)}};
  if (r.forward.milliseconds > 0) {
    json["forward_only"] = ToJson(r.forward);
    json["forward_only"]["limit"] = ToJson(r.forward_limit);
    json["forward_only"]["ratio"] = r.forward_ratio;
  }
  json["all_milliseconds"] = r.all_milliseconds;
  json["all_limit_milliseconds"] = r.all_limit_milliseconds;
  json["hardware"] = r.hardware;
  if (r.ratio == 0) json["ratio"] = nullptr;
  if (!r.error.empty()) json["error"] = r.error;
  return json;
}

void PrintTables(const std::vector<KernelCase>& cases, const std::vector<KernelResult>& results) {
  std::printf("%8s %8s %7s %6s %11s %11s %7s %8s %10s %9s %9s %9s  %s\n", "tokens", "vocab", "hidden",
              "dtype", "fused ms", "limit ms", "ratio", "TFLOP/s", "peak MiB", "err loss", "err dx", "err dw",
              "limit");
  for (size_t i = 0; i < cases.size(); ++i) {
    const KernelCase& c = cases[i];
    const KernelResult& r = results[i];
    std::printf("%8lld %8lld %7lld %6s %11.2f %11.2f %7.3f %8s %10.1f %9.1e %9.1e %9.1e  %s\n",
                static_cast<long long>(c.tokens), static_cast<long long>(c.vocab),
                static_cast<long long>(c.hidden), ShortName(c.dtype).c_str(), r.step.milliseconds,
                r.limit.milliseconds, r.ratio,
                Number(r.step.milliseconds > 0, "%.3f", Tflops(r.step)).c_str(), Mebibytes(r.peak_bytes),
                r.relative_error.loss, r.relative_error.dx, r.relative_error.dw,
                r.error.empty() ? r.limit_kind.c_str() : r.error.c_str());
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    if (results[i].error.empty()) PrintParts(cases[i], results[i]);
  }
}

}  // namespace lossd::bench
