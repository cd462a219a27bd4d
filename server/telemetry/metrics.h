// Exports the engine's plain counters in Prometheus' text format. The engine knows nothing of it.
#ifndef LOSSD_SERVER_TELEMETRY_METRICS_H_
#define LOSSD_SERVER_TELEMETRY_METRICS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/telemetry/service_counters.h"

namespace prometheus {
class Exposer;
class Collectable;
}  // namespace prometheus

namespace lossd::telemetry {

// Serves /metrics over HTTP while it lives. Reads the counters at each scrape; every label combination is
// there from the start, at zero.
class MetricsServer {
 public:
  // `listen` is host:port; port 0 takes a free one. `engine` and `counters` outlive it. UNAVAILABLE if the
  // address cannot be used.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& listen,
                                                              const engine::Engine* engine,
                                                              const ServiceCounters* counters);
  ~MetricsServer();

  int port() const { return port_; }

 private:
  MetricsServer(std::unique_ptr<prometheus::Exposer> exposer,
                std::shared_ptr<prometheus::Collectable> collector, std::string host, int port);

  std::shared_ptr<prometheus::Collectable> collector_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  std::string host_;
  int port_;
};

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_METRICS_H_
