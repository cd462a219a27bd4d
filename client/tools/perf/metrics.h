// What a server's Prometheus endpoint says about its stages.
#ifndef LOSSD_CLIENT_TOOLS_PERF_METRICS_H_
#define LOSSD_CLIENT_TOOLS_PERF_METRICS_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/tools/perf/percentiles.h"

namespace lossd::perf {

// Series as they are written, 'name{label="value"}', and their values.
using Metrics = std::map<std::string, double, std::less<>>;

Metrics ParseMetrics(absl::string_view text);

// GET http://ADDRESS/metrics; `address` is "host:port".
absl::StatusOr<Metrics> ReadMetrics(const std::string& address);

// The histogram `name`; `label` is 'key="value"' or empty. Empty if it is not there.
Histogram HistogramOf(const Metrics& metrics, const std::string& name, const std::string& label);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_METRICS_H_
