#include "bench/kernels/ranks/rank_report.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "bench/kernels/command_line.h"
#include "bench/kernels/measure.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kWait[] = "wait for ";

bool IsWait(const std::string& stage) { return stage.rfind(kWait, 0) == 0; }

Json Describe(const KernelCase& c, const DevicesOptions& options) {
  return {{"tokens", c.tokens},
          {"vocab", c.vocab},
          {"hidden", c.hidden},
          {"dtype", ShortName(c.dtype)},
          {"fixed_segments", c.segments == kernels::Segments::kFixed},
          {"workspace_bytes", c.workspace_bytes},
          {"ignored", c.ignored},
          {"lse_spread", c.lse_spread},
          {"options",
           {{"logit_scale", c.options.logit_scale},
            {"softcap", c.options.softcap},
            {"label_smoothing", c.options.label_smoothing},
            {"lse_square_scale", c.options.lse_square_scale}}},
          {"devices", options.devices},
          {"steps", options.steps},
          {"rows_arrive", options.rows_arrive}};
}

double Slowest(const Json& ranks, const char* time) {
  double slowest = 0;
  for (const Json& rank : ranks) slowest = std::max(slowest, rank[time].get<double>());
  return slowest;
}

// How long the rank waits that waits longest; 0 where nobody does.
double Longest(const Json& waits, const char* exchange) {
  double longest = 0;
  if (!waits.contains(exchange)) return longest;
  for (const Json& time : waits[exchange]) longest = std::max(longest, time.get<double>());
  return longest;
}

std::string Title(const Json& c) {
  return std::to_string(c["tokens"].get<int64_t>()) + " tokens, vocabulary " +
         std::to_string(c["vocab"].get<int64_t>()) + ", hidden " +
         std::to_string(c["hidden"].get<int64_t>()) + ", " + c["dtype"].get<std::string>();
}

void PrintLine(const Json& c) {
  std::printf("%8lld %8lld %7lld %6s", static_cast<long long>(c["tokens"].get<int64_t>()),
              static_cast<long long>(c["vocab"].get<int64_t>()),
              static_cast<long long>(c["hidden"].get<int64_t>()), c["dtype"].get<std::string>().c_str());
  if (c.contains("error")) {
    std::printf("  %s\n", c["error"].get<std::string>().c_str());
    return;
  }
  const Json& difference = c["relative_difference"];
  std::printf(" %11.2f %11.2f %9.3f %11.3f %11.3f %9s %9.1e %9.1e %9.1e\n",
              c["one_device_milliseconds"].get<double>(), c["milliseconds"].get<double>(),
              c["speedup"].get<double>(), Longest(c["waits"], "statistics"), Longest(c["waits"], "parts"),
              c["copy_engines"].get<bool>() ? "copies" : "messages", difference["loss"].get<double>(),
              difference["dx"].get<double>(), difference["dw"].get<double>());
}

// A column a rank.
void PrintRanks(const Json& c) {
  const Json& ranks = c["ranks"];
  std::printf("\n%s; %lld rows at once\n    %-24s", Title(c).c_str(),
              static_cast<long long>(ranks[0]["tile_rows"].get<int64_t>()), "ms");
  for (const Json& rank : ranks) std::printf(" %10s", rank["device"].get<std::string>().c_str());
  std::printf("\n");
  const auto row = [&](const std::string& name, const auto& value) {
    std::printf("    %-24s", name.c_str());
    for (const Json& rank : ranks) std::printf(" %10.3f", value(rank));
    std::printf("\n");
  };
  const auto time = [&row](const char* name, const char* key) {
    row(name, [key](const Json& rank) { return rank[key].template get<double>(); });
  };
  time("one device", "one_device_milliseconds");
  time("one device, all busy", "busy_one_device_milliseconds");
  time("over devices", "milliseconds");
  for (const Json& stage : ranks[0]["stages"]) {
    const std::string name = stage["name"].get<std::string>();
    row("  " + name, [&name](const Json& rank) {
      for (const Json& other : rank["stages"]) {
        if (other["name"] == name) return other["milliseconds"].template get<double>();
      }
      return 0.0;
    });
  }
}

}  // namespace

void RankTimes::Add(const StageTimes& round) {
  std::map<std::string, double> sums;
  for (const auto& [name, milliseconds] : round) {
    sums[name] += milliseconds;
    const auto same = [&name = name](const auto& stage) { return stage.first == name; };
    if (std::none_of(stages.begin(), stages.end(), same)) stages.push_back({name, {}});
  }
  for (auto& [name, all] : stages) all.push_back(sums[name]);
}

Json ToJson(const RankTimes& times) {
  Json json = {{"milliseconds", Median(times.all_milliseconds)},
               {"one_device_milliseconds", Median(times.all_one_device_milliseconds)},
               {"busy_one_device_milliseconds", Median(times.all_busy_milliseconds)},
               {"tile_rows", times.tile_rows},
               {"one_device_tile_rows", times.whole_tile_rows},
               {"copy_engines", times.uses_copy_engines},
               {"hardware", times.hardware},
               {"relative_difference",
                {{"loss", times.difference.loss}, {"dx", times.difference.dx}, {"dw", times.difference.dw}}},
               {"stages", Json::array()},
               {"all_milliseconds", times.all_milliseconds},
               {"all_one_device_milliseconds", times.all_one_device_milliseconds}};
  for (const auto& [name, all] : times.stages) {
    json["stages"].push_back({{"name", name}, {"milliseconds", Median(all)}});
  }
  return json;
}

Json Collect(const KernelCase& kernel_case, const DevicesOptions& options,
             const std::vector<std::string>& of_ranks) {
  Json ranks = Json::array();
  Json waits = Json::object();
  Json difference = {{"loss", 0.0}, {"dx", 0.0}, {"dw", 0.0}};
  for (size_t i = 0; i < of_ranks.size(); ++i) {
    Json rank = {{"device", options.devices[i]}};
    rank.update(Json::parse(of_ranks[i]));
    for (const Json& stage : rank["stages"]) {
      const std::string name = stage["name"].get<std::string>();
      if (IsWait(name)) waits[name.substr(sizeof(kWait) - 1)].push_back(stage["milliseconds"]);
    }
    for (auto& [what, largest] : difference.items()) {
      largest = std::max(largest.get<double>(), rank["relative_difference"][what].get<double>());
    }
    rank.erase("relative_difference");
    ranks.push_back(std::move(rank));
  }
  const double one = Slowest(ranks, "one_device_milliseconds");
  const double busy = Slowest(ranks, "busy_one_device_milliseconds");
  const double over = Slowest(ranks, "milliseconds");
  const bool copies = std::all_of(ranks.begin(), ranks.end(),
                                  [](const Json& rank) { return rank["copy_engines"].get<bool>(); });
  Json json = Describe(kernel_case, options);
  json.update(Json{{"one_device_milliseconds", one},
                   {"busy_one_device_milliseconds", busy},
                   {"milliseconds", over},
                   {"speedup", one / over},
                   {"speedup_over_busy_device", busy / over},
                   {"waits", waits},
                   {"copy_engines", copies},
                   {"relative_difference", difference},
                   {"ranks", ranks}});
  return json;
}

Json Failed(const KernelCase& kernel_case, const DevicesOptions& options, const std::string& problem) {
  Json json = Describe(kernel_case, options);
  json["error"] = problem;
  return json;
}

void PrintTables(const std::vector<Json>& cases) {
  std::printf("%8s %8s %7s %6s %11s %11s %9s %11s %11s %9s %9s %9s %9s\n", "tokens", "vocab", "hidden",
              "dtype", "one ms", "over ms", "speed-up", "statistics", "parts", "moved by", "diff loss",
              "diff dx", "diff dw");
  for (const Json& c : cases) PrintLine(c);
  for (const Json& c : cases) {
    if (!c.contains("error")) PrintRanks(c);
  }
}

}  // namespace lossd::bench
