// What runs over devices found, beside those on one of them.
#ifndef LOSSD_CLIENT_TOOLS_PERF_COMPARISON_H_
#define LOSSD_CLIENT_TOOLS_PERF_COMPARISON_H_

#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace lossd::perf {

struct Side {
  std::string devices;
  std::vector<nlohmann::ordered_json> rounds;  // reports, as report.h makes them
};

// speedup, of the median rates; and of each side its devices, tokens_per_second (the median), and rounds.
// What no round measured is null.
nlohmann::ordered_json Compare(Side one_device, Side over_devices);

// Whether Compare made it.
bool IsComparison(const nlohmann::ordered_json& report);

// The report of each side's middle round, and the rates side by side.
std::string ComparisonText(const nlohmann::ordered_json& comparison);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_COMPARISON_H_
