#include "server/telemetry/metrics/collect.h"

#include <prometheus/text_serializer.h>

namespace lossd::telemetry {

std::string MetricsText(const engine::Engine& engine, const ServiceCounters& counters,
                        const GpusSensors& gpus) {
  const engine::GroupReport group = engine.Group();
  Exposition all;
  CollectWork(engine, all);
  CollectWindows(engine, all);
  CollectHeads(engine, group, all);
  CollectMemory(engine, group, all);
  CollectGpus(gpus, group, all);
  CollectGroup(group, all);
  CollectReplicas(engine.replicas().Read(), all);
  CollectCalls(counters, all);
  CollectProcess(engine, all);
  return prometheus::TextSerializer().Serialize(all.Take());
}

}  // namespace lossd::telemetry
