// What a sweep leaves in its folder: sweep.json with everything, sweep.csv for spreadsheets, sweep.md to
// read.
#ifndef LOSSD_BENCH_KERNELS_SWEEP_REPORT_H_
#define LOSSD_BENCH_KERNELS_SWEEP_REPORT_H_

#include <nlohmann/json.hpp>
#include <string>

namespace lossd::bench {

// `sweep` has "command", "time", "cases": those of `kernels --json`, each with a "name" if it has one.
// Empty, or which file could not be written.
std::string WriteReports(const nlohmann::ordered_json& sweep, const std::string& folder);

// One line about one case.
std::string CaseLine(const nlohmann::ordered_json& one);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_SWEEP_REPORT_H_
