#include "server/telemetry/metrics.h"

#include <utility>

#include "server/telemetry/metrics/collect.h"
#include "server/telemetry/status_page/server_status.h"
#include "server/telemetry/status_page/status_page.h"

namespace lossd::telemetry {
namespace {

// Prometheus' text format.
constexpr char kMetricsType[] = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(std::vector<int> listeners,
                                                                    HttpHosts hosts,
                                                                    const engine::Engine* engine,
                                                                    const ServiceCounters* counters) {
  std::unique_ptr<MetricsServer> server(new MetricsServer(&engine->counters()));
  const Throughput* const throughput = &server->throughput_;
  // Those of other hosts cannot be asked, and a GPU of this one may have the same number.
  const engine::GroupReport group = engine->Group();
  for (const engine::RankReport& rank : group.ranks) {
    const bool here = rank.host == group.ranks.front().host;
    server->gpus_.push_back(here ? GpuSensors::Open(rank.pci_bus_id) : nullptr);
  }
  const GpusSensors* const gpus = &server->gpus_;
  HttpServer::Pages pages;
  pages.emplace("/metrics", [=] { return HttpPage{kMetricsType, MetricsText(*engine, *counters, *gpus)}; });
  pages.emplace("/", [=] { return StatusPage(ReadStatus(*engine, *counters, *throughput)); });
  pages.emplace("/status.json", [=] {
    return HttpPage{"application/json", StatusJson(ReadStatus(*engine, *counters, *throughput))};
  });
  absl::StatusOr<std::unique_ptr<HttpServer>> http =
      HttpServer::Start(std::move(listeners), std::move(hosts), std::move(pages));
  if (!http.ok()) return http.status();
  server->http_ = *std::move(http);
  return server;
}

}  // namespace lossd::telemetry
