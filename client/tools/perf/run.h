// One measurement from a server's address, or none, to a report.
#ifndef LOSSD_CLIENT_TOOLS_PERF_RUN_H_
#define LOSSD_CLIENT_TOOLS_PERF_RUN_H_

#include <atomic>
#include <string>

#include "client/tools/perf/settings.h"
#include "client/tools/progress_bar.h"
#include "nlohmann/json.hpp"

namespace lossd::perf {

struct Outcome {
  ExitCode exit_code = ExitCode::kOk;
  std::string problem = {};            // empty, or why there is no report
  nlohmann::ordered_json report = {};  // null if there is a problem
};

// Progress goes to standard error. Leaves nothing behind at the server, head and sessions
// are deleted, or says there what it had to leave.
Outcome Run(const Settings& settings, tools::ProgressBar::Style progress,
            const std::atomic<bool>& interrupted);

// The same over settings.devices and on the first of them, in turns, each with a server that lives as long as
// this takes; the report is comparison.h's.
Outcome RunOverDevices(const Settings& settings, tools::ProgressBar::Style progress,
                       const std::atomic<bool>& interrupted);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_RUN_H_
