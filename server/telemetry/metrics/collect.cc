#include "server/telemetry/metrics/collect.h"

#include <prometheus/text_serializer.h>

namespace lossd::telemetry {

std::string MetricsText(const engine::Engine& engine, const ServiceCounters& counters,
                        const GpuSensors* gpu) {
  Exposition all;
  CollectWork(engine, all);
  CollectWindows(engine, all);
  CollectHeads(engine, all);
  CollectMemory(engine, all);
  if (gpu != nullptr) CollectGpu(gpu->Read(), all);
  CollectCalls(counters, all);
  CollectProcess(engine, all);
  return prometheus::TextSerializer().Serialize(all.Take());
}

}  // namespace lossd::telemetry
