// What a run found, for programs and for people.
#ifndef LOSSD_CLIENT_TOOLS_PERF_REPORT_H_
#define LOSSD_CLIENT_TOOLS_PERF_REPORT_H_

#include <optional>
#include <string>
#include <vector>

#include "client/tools/perf/flushes.h"
#include "client/tools/perf/load.h"
#include "client/tools/perf/metrics.h"
#include "client/tools/perf/problem.h"
#include "client/tools/perf/settings.h"
#include "nlohmann/json.hpp"

namespace lossd::perf {

// Two readings, before and after the measurement.
template <typename Reading>
struct Span {
  Reading before = {};
  Reading after = {};
};

struct Findings {
  std::string target = {};
  std::string server_version = {};
  std::string device = {};
  Check check = {};
  LoadResult load = {};
  Span<double> client_cpu = {};                 // seconds
  std::optional<Span<double>> server_cpu = {};  // of a server of its own
  std::optional<Span<Metrics>> metrics = {};
  std::vector<FlushTimes> flushes = {};  // empty: none were asked for
  ServerMemory memory = {};
};

// Bytes of tensors of one token to the server, and back.
int64_t BytesIn(const Settings& settings);
int64_t BytesOut(const Settings& settings);

nlohmann::ordered_json Report(const Settings& settings, const Findings& findings);
// The report as text of several lines.
std::string ReportText(const nlohmann::ordered_json& report);

bool Failed(const LoadResult& load);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_REPORT_H_
