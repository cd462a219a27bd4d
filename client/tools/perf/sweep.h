// lossd-perf sweep: one run for each combination of some settings, and a folder of tables.
#ifndef LOSSD_CLIENT_TOOLS_PERF_SWEEP_H_
#define LOSSD_CLIENT_TOOLS_PERF_SWEEP_H_

#include <atomic>
#include <string>

#include "CLI/CLI.hpp"
#include "client/tools/perf/settings.h"
#include "nlohmann/json.hpp"

namespace lossd::perf {

// Adds the command to `app`; parsing it runs it and sets *exit_code.
CLI::App& AddSweepCommand(CLI::App& app, const std::atomic<bool>& interrupted, ExitCode* exit_code);

// sweep.csv and sweep.md of a sweep: {"command", "time", "cases": reports, or settings and "error"}.
std::string SweepCsv(const nlohmann::ordered_json& sweep);
std::string SweepMarkdown(const nlohmann::ordered_json& sweep);
// One line about one case.
std::string CaseLine(const nlohmann::ordered_json& one);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_SWEEP_H_
