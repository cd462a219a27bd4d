#include "server/telemetry/metrics.h"

#include <utility>

#include "server/telemetry/collect.h"

namespace lossd::telemetry {
namespace {

// Prometheus' text format.
constexpr char kMetricsType[] = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& listen,
                                                                    const engine::Engine* engine,
                                                                    const ServiceCounters* counters) {
  HttpServer::Pages pages;
  pages.emplace("/metrics", [engine, counters] {
    return HttpPage{kMetricsType, MetricsText(*engine, *counters)};
  });
  absl::StatusOr<std::unique_ptr<HttpServer>> http = HttpServer::Start(listen, std::move(pages));
  if (!http.ok()) return http.status();
  return std::unique_ptr<MetricsServer>(new MetricsServer(*std::move(http)));
}

}  // namespace lossd::telemetry
