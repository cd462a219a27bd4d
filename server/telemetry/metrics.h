// The metrics port: what the engine and the services count, for Prometheus and for people. They know nothing
// of it.
#ifndef LOSSD_SERVER_TELEMETRY_METRICS_H_
#define LOSSD_SERVER_TELEMETRY_METRICS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/telemetry/common/service_counters.h"
#include "server/telemetry/http/http_hosts.h"
#include "server/telemetry/http/http_server.h"
#include "server/telemetry/metrics/gpu_sensors.h"
#include "server/telemetry/status_page/throughput.h"

namespace lossd::telemetry {

// Serves /metrics, the status page and /status.json over HTTP while it lives. Everything is read when it is
// asked for.
class MetricsServer {
 public:
  // `listeners` and `hosts` are HttpServer's. They, `engine` and `counters` outlive it. UNAVAILABLE, as
  // HttpServer.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(std::vector<int> listeners, HttpHosts hosts,
                                                              const engine::Engine* engine,
                                                              const ServiceCounters* counters);

 private:
  explicit MetricsServer(const engine::Counters* counters) : throughput_(counters) {}

  const Throughput throughput_;
  GpusSensors gpus_;
  std::unique_ptr<HttpServer> http_;  // reads the above
};

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_METRICS_H_
