// The metrics port: what the engine and the services count, for Prometheus and for people. They know nothing
// of it.
#ifndef LOSSD_SERVER_TELEMETRY_METRICS_H_
#define LOSSD_SERVER_TELEMETRY_METRICS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/telemetry/http_server.h"
#include "server/telemetry/service_counters.h"

namespace lossd::telemetry {

// Serves /metrics over HTTP while it lives. Everything is read when it is asked for.
class MetricsServer {
 public:
  // `listen` is host:port; port 0 takes a free one. `engine` and `counters` outlive it. UNAVAILABLE if the
  // address cannot be used.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& listen,
                                                              const engine::Engine* engine,
                                                              const ServiceCounters* counters);

  int port() const { return http_->port(); }

 private:
  explicit MetricsServer(std::unique_ptr<HttpServer> http) : http_(std::move(http)) {}

  const std::unique_ptr<HttpServer> http_;
};

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_METRICS_H_
