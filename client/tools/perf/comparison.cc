#include "client/tools/perf/comparison.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/tools/perf/report.h"

namespace lossd::perf {
namespace {

using Json = nlohmann::ordered_json;

// Those that have a rate, slowest first.
std::vector<const Json*> ByRate(const Json& rounds) {
  std::vector<const Json*> sorted;
  for (const Json& round : rounds) {
    if (round["tokens_per_second"].is_number()) sorted.push_back(&round);
  }
  std::sort(sorted.begin(), sorted.end(), [](const Json* a, const Json* b) {
    return (*a)["tokens_per_second"].get<double>() < (*b)["tokens_per_second"].get<double>();
  });
  return sorted;
}

Json MedianRate(const Json& rounds) {
  const std::vector<const Json*> sorted = ByRate(rounds);
  if (sorted.empty()) return nullptr;
  const auto rate = [&](size_t i) { return (*sorted[i])["tokens_per_second"].get<double>(); };
  return (rate((sorted.size() - 1) / 2) + rate(sorted.size() / 2)) / 2;
}

Json ToJson(Side side) {
  Json rounds = std::move(side.rounds);
  Json rate = MedianRate(rounds);
  return {{"devices", side.devices}, {"tokens_per_second", std::move(rate)}, {"rounds", std::move(rounds)}};
}

std::string Line(const char* name, const Json& side) {
  const std::vector<const Json*> sorted = ByRate(side["rounds"]);
  std::string line = absl::StrFormat("  %-14s%-24s", name, side["devices"].get<std::string>());
  if (sorted.empty()) return absl::StrCat(line, "not measured\n");
  const auto rate = [](const Json* round) { return (*round)["tokens_per_second"].get<double>(); };
  return absl::StrCat(line, absl::StrFormat("%.0f tokens/s (%.0f to %.0f, rounds: %d)\n",
                                            side["tokens_per_second"].get<double>(), rate(sorted.front()),
                                            rate(sorted.back()), sorted.size()));
}

}  // namespace

Json Compare(Side one_device, Side over_devices) {
  Json one = ToJson(std::move(one_device));
  Json over = ToJson(std::move(over_devices));
  Json speedup;
  if (one["tokens_per_second"].is_number() && over["tokens_per_second"].is_number()) {
    speedup = over["tokens_per_second"].get<double>() / one["tokens_per_second"].get<double>();
  }
  return {{"speedup", std::move(speedup)}, {"one_device", std::move(one)}, {"over_devices", std::move(over)}};
}

bool IsComparison(const Json& report) { return report.contains("over_devices"); }

std::string ComparisonText(const Json& comparison) {
  std::string text;
  for (const char* side : {"one_device", "over_devices"}) {
    const std::vector<const Json*> sorted = ByRate(comparison[side]["rounds"]);
    if (!sorted.empty()) absl::StrAppend(&text, ReportText(*sorted[sorted.size() / 2]), "\n");
  }
  absl::StrAppend(&text, Line("one device", comparison["one_device"]),
                  Line("over devices", comparison["over_devices"]));
  if (const Json& speedup = comparison["speedup"]; speedup.is_number()) {
    absl::StrAppend(&text, absl::StrFormat("  %-14s%.3f\n", "speed-up", speedup.get<double>()));
  }
  return text;
}

}  // namespace lossd::perf
